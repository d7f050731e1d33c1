"""Diffusers: see pipeline.py."""

from lib_rocm_sd.hosts.diffusers.pipeline import PipelinePatch, patched

__all__ = ["PipelinePatch", "patched"]
