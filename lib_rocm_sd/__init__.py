"""Fused kernels for Stable Diffusion on AMD GPUs; importing this does no work, needs no GPU."""

__version__ = "0.1.0"
