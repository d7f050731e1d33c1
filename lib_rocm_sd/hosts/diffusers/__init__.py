"""Diffusers: see pipeline.py."""

import lib_rocm_sd.torch_ops  # noqa: F401 - torch.compile then keeps attention whole
from lib_rocm_sd.hosts.diffusers.pipeline import PipelinePatch, patched

__all__ = ["PipelinePatch", "patched"]
