"""What kernels/norm_gradients.hip is compiled with and called with: the last step of both norms.

Needs no torch, so that it can be compiled without.
"""

from __future__ import annotations

import ctypes
from functools import cache

from lib_rocm_sd.ops.base import KernelSpec

SOURCE = "norm_gradients.hip"
THREADS = 256
FEW_PARTS = 8
"""As many are added by one work-item."""
COLUMNS = 16
"""Columns of a work-group where there are more parts than FEW_PARTS."""


class NormGradientsParams(ctypes.Structure):
    """The argument of norm_gradients; the same struct stands in norm_gradients.hip."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("pairs", "gamma", "beta")),
        *((name, ctypes.c_uint32) for name in ("parts", "channels", "width", "kind")),
    ]


def width_of(parts: int) -> int:
    """Columns of a work-group."""
    return THREADS if parts <= FEW_PARTS else COLUMNS


@cache
def spec() -> KernelSpec:
    """The kernel."""
    return KernelSpec(SOURCE, "norm_gradients", (("BF16_HALVES", 0), ("THREADS", THREADS)))
