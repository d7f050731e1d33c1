"""Diffusers: see pipeline.py and dispatch.py."""

import lib_rocm_sd.torch_ops  # noqa: F401 - torch.compile then keeps attention whole
from lib_rocm_sd.hosts.diffusers.dispatch import register
from lib_rocm_sd.hosts.diffusers.pipeline import PipelinePatch, Switch, patched, switched_on

__all__ = ["PipelinePatch", "Switch", "patched", "register", "switched_on"]
