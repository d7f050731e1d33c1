"""Diffusers: see pipeline.py and dispatch.py."""

from lib_rocm_sd.hosts.diffusers.dispatch import register
from lib_rocm_sd.hosts.diffusers.pipeline import PipelinePatch, Switch, patched, switched_on

__all__ = ["PipelinePatch", "Switch", "patched", "register", "switched_on"]
