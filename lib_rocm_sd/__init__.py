"""Fused kernels for Stable Diffusion on AMD GPUs. Importing this package does no work and needs no GPU."""

__version__ = "0.1.0"
