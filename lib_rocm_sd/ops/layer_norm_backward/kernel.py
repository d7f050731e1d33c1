"""What kernels/layer_norm_backward.hip is compiled with and called with.

Needs no torch. Only training needs these kernels: nothing compiles them before they are called.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.layer_norm import kernel as forward
from lib_rocm_sd.ops.layer_norm.kernel import (
    AFFINE_KINDS,
    DTYPES,
    HELD,
    VECTOR,
    LayerNormConfig,
)
from lib_rocm_sd.ops.layer_norm_backward import gradients

SOURCE = "layer_norm_backward.hip"
UNROLL = 4
"""Rows that a work-item has in flight where parts are made."""
COLUMNS = 32
"""Most columns of a work-group that makes a part, of eight channels or of one."""
LEAST_ROWS = 32
"""Fewest rows of a part."""
WANTED_GROUPS = 512
"""Work-groups that make parts, where there are rows enough for so many."""
MOST_PARTS = 256
PART_THREADS = 256


class LayerNormBackwardParams(ctypes.Structure):
    """The argument of both kernels; the same struct stands in layer_norm_backward.hip."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("grad", "x", "added", "sum_grad", "out")),
        *((name, ctypes.c_uint64) for name in ("gamma", "moments", "parts")),
        *((name, ctypes.c_uint32) for name in ("rows", "channels", "lanes", "lane_bits")),
        *((name, ctypes.c_uint32) for name in ("part_rows", "width", "column_blocks", "aligned")),
        *((name, ctypes.c_float) for name in ("eps", "share")),
    ]


@dataclass(frozen=True)
class BackwardForm:
    """What the first kernel is compiled for. `affine`: of AFFINE_KINDS; `held`: of HELD, or 0."""

    dtype: str
    added: bool
    affine: str
    held: int


@dataclass(frozen=True)
class PartsTiling:
    """How rows are cut into parts, and these into work-groups of `width` columns."""

    vector: int
    part_rows: int
    parts: int
    width: int
    column_blocks: int

    @property
    def grid(self) -> int:
        """Work-groups."""
        return self.parts * self.column_blocks


def configs(arch: Arch, channels: int) -> tuple[LayerNormConfig, ...]:
    """The one that the forward pass runs unmeasured."""
    return forward.configs(arch, channels)[:1]


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@lru_cache(maxsize=256)
def parts_tiling(rows: int, channels: int) -> PartsTiling:
    """Tiling of `rows` rows, at least one, into parts."""
    vector = VECTOR if channels % VECTOR == 0 else 1
    vectors = channels // vector
    blocks = _ceil(vectors, COLUMNS)
    parts = max(1, min(_ceil(WANTED_GROUPS, blocks), rows // LEAST_ROWS, MOST_PARTS))
    part_rows = _ceil(rows, parts)
    return PartsTiling(vector, part_rows, _ceil(rows, part_rows), _ceil(vectors, blocks), blocks)


@cache
def input_spec(form: BackwardForm, config: LayerNormConfig) -> KernelSpec:
    """grad, x -> out, moments."""
    defines = {
        "STEP_INPUT": 1,
        "BF16_HALVES": int(form.dtype == "bfloat16"),
        "ADDED": int(form.added),
        "AFFINE": AFFINE_KINDS.index(form.affine),
        "HELD": form.held,
        "THREADS": config.threads,
    }
    return KernelSpec(SOURCE, "layer_norm_backward", tuple(defines.items()))


@cache
def parts_spec(dtype: str, added: bool, vector: int) -> KernelSpec:
    """grad, x, moments -> parts."""
    defines = {
        "STEP_PARTS": 1,
        "BF16_HALVES": int(dtype == "bfloat16"),
        "ADDED": int(added),
        "VECTOR": vector,
        "UNROLL": UNROLL,
        "THREADS": PART_THREADS,
    }
    return KernelSpec(SOURCE, "layer_norm_backward_parts", tuple(defines.items()))


def _usual(dtype: str) -> list[KernelSpec]:
    """With gamma of the rows' dtype, channels in eights."""
    rows = [
        input_spec(BackwardForm(dtype, added, dtype, held), forward.CONFIGS[0])
        for held in HELD
        for added in (False, True)
    ]
    return [*rows, *(parts_spec(dtype, added, VECTOR) for added in (False, True)), gradients.spec()]


def shipped_specs(arch: Arch) -> list[KernelSpec]:
    """What `compile` makes for a GPU when it is asked; no install does."""
    return list(dict.fromkeys(spec for dtype in DTYPES for spec in _usual(dtype)))


def searched_specs(arch: Arch) -> list[KernelSpec]:
    """The same, float16: there is one config."""
    return _usual(DTYPES[0])
