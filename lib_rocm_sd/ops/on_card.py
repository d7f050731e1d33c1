"""Whether what belongs to other libraries can run on a GPU here."""

from __future__ import annotations

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import reasons
from lib_rocm_sd.ops.lazily import torch


def card_refusals(arch: Arch | None) -> list[str]:
    """Why nothing can run on a GPU in this process. torch is not made to begin with its GPUs for
    the question: before it has, no input lies on one.
    """
    return reasons((arch is None or not torch.cuda.is_initialized(), "no supported GPU"))
