"""Diffusers: see pipeline.py."""

from lib_rocm_sd.hosts.diffusers.pipeline import Patch, patched

__all__ = ["Patch", "patched"]
