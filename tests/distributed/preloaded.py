"""What ranks need, imported once."""

from __future__ import annotations

import contextlib

import torch

torch.set_num_threads(1)
with contextlib.suppress(ImportError):
    import diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion  # noqa: F401
    import transformers  # noqa: F401

import lib_rocm_sd.commands.little_model
import lib_rocm_sd.distributed
import lib_rocm_sd.hosts.diffusers.pipeline  # noqa: F401
