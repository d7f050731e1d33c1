"""Whether our kernels in Triton (triton_kernels/) can run here."""

from __future__ import annotations

import torch

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops import optional

LAUNCHING = "lib_rocm_sd.triton_kernels.launching"


def triton_refusals(arch: Arch | None, run: str) -> list[str]:
    """Why no kernel of ours in Triton can run here; `run` is the module that launches it."""
    if arch is None or not torch.cuda.is_available():
        return ["no supported GPU"]
    why = optional.absent("triton", run) or optional.module(LAUNCHING).too_old()
    return [why] if why else []
