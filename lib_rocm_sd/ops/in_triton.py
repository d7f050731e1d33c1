"""Whether our kernels in Triton (triton_kernels/) can run here."""

from __future__ import annotations

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops import optional
from lib_rocm_sd.ops.on_card import card_refusals

LAUNCHING = "lib_rocm_sd.triton_kernels.launching"


def triton_refusals(arch: Arch | None, run: str) -> list[str]:
    """Why no kernel of ours in Triton can run here; `run` is the module that launches it."""
    none = card_refusals(arch)
    if none:
        return none
    why = optional.absent("triton", run) or optional.module(LAUNCHING).too_old()
    return [why] if why else []
