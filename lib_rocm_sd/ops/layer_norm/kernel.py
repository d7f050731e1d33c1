"""What kernels/layer_norm.hip is compiled with and called with.

Needs no torch, so that install.py can use it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import HALVES, KernelSpec

SOURCE = "layer_norm.hip"
DTYPES = HALVES
AFFINE_KINDS = ("none", "float16", "bfloat16", "float32")
"""Kinds of gamma and beta, in the order of AffineKind in layer_norm.hip."""
ADDED_KINDS = ("nothing", "tensor", "rows", "kept rows", "gated")
"""What is added first, in the order of AddedKind in layer_norm.hip; the last if modulated."""
RMS_KINDS = ("no", "RMSNorm", "RMSNorm and SiLU")
"""Norms without a mean, in the order of RmsKind in layer_norm.hip."""
VECTOR = 8
"""Values that are read at once."""
HELD = (4, 5, 6)
"""Vectors that a work-item may hold; what is between two powers of two fits one of these."""
LEAST_LANES = 4


class LayerNormParams(ctypes.Structure):
    """The argument of layer_norm; the same struct stands in layer_norm.hip."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("x", "added", "out", "sum", "gamma", "beta")),
        *((name, ctypes.c_uint64) for name in ("more", "ahead")),
        *((name, ctypes.c_int64) for name in ("x_stride", "added_stride")),
        *((name, ctypes.c_uint32) for name in ("rows", "channels", "lanes", "lane_bits")),
        ("aligned", ctypes.c_uint32),
        *((name, ctypes.c_float) for name in ("eps", "share")),
    ]


class ModulatedParams(ctypes.Structure):
    """The same with MODULATED: `more` is the gate, gamma and beta are scale and shift."""

    _fields_ = [
        *LayerNormParams._fields_,
        *((name, ctypes.c_uint32) for name in ("tokens", "image_stride")),
    ]


@dataclass(frozen=True)
class LayerNormConfig:
    """Work-items of a work-group."""

    threads: int


CONFIGS = tuple(LayerNormConfig(threads) for threads in (128, 256))


@dataclass(frozen=True)
class LayerNormTiling:
    """How rows are cut: `lanes` work-items make one, each with `held` vectors, or 0: read twice."""

    lanes: int
    held: int

    def grid(self, rows: int, config: LayerNormConfig) -> int:
        """Work-groups of a launch."""
        return -(-rows * self.lanes // config.threads)


@lru_cache(maxsize=256)
def tiling(channels: int, config: LayerNormConfig) -> LayerNormTiling:
    """The fewest work-items that hold a row; where they would be more than a work-group has, or
    rows are no whole vectors, as many as have something to do.
    """
    vectors = -(-channels // VECTOR)
    lanes = LEAST_LANES
    while lanes * HELD[-1] < vectors and lanes < config.threads:
        lanes *= 2
    held = max(-(-vectors // lanes), HELD[0])
    whole = channels % VECTOR == 0
    return LayerNormTiling(lanes, held if whole and held <= HELD[-1] else 0)


@lru_cache(maxsize=256)
def configs(arch: Arch, channels: int) -> tuple[LayerNormConfig, ...]:
    """The search space, the safe default first: small work-groups, so that few rows are spread
    over many compute units. If some hold a row in registers, only those.
    """
    found = tuple(config for config in CONFIGS if tiling(channels, config).held)
    return found or (CONFIGS if channels <= CONFIGS[-1].threads else CONFIGS[-1:])


@cache
def spec(
    dtype: str,
    added: str,
    affine: str,
    held: int,
    config: LayerNormConfig,
    modulated: bool = False,
    rms: int = 0,
) -> KernelSpec:
    """The kernel. `added`: of ADDED_KINDS; `affine`: of AFFINE_KINDS; `held`: of HELD, or 0."""
    defines = {
        "BF16_HALVES": int(dtype == "bfloat16"),
        "ADDED": ADDED_KINDS.index(added),
        "AFFINE": AFFINE_KINDS.index(affine),
        "HELD": held,
        "THREADS": config.threads,
        **({"MODULATED": 1} if modulated else {}),
        **({"RMS": rms} if rms else {}),
    }
    return KernelSpec(SOURCE, "layer_norm", tuple(defines.items()))


def _specs(dtype: str, config: LayerNormConfig) -> list[KernelSpec]:
    """With gamma and beta of the rows' dtype, as a model in halves has them."""
    return [spec(dtype, added, dtype, held, config) for held in HELD for added in ADDED_KINDS[:4]]


def shipped_specs(arch: Arch) -> list[KernelSpec]:
    """What is compiled ahead for a GPU: both half types, with a tensor added first and without."""
    return [spec for dtype in DTYPES for spec in _specs(dtype, CONFIGS[0])]


def searched_specs(arch: Arch) -> list[KernelSpec]:
    """Every config of the search space, float16."""
    return [spec for config in CONFIGS for spec in _specs(DTYPES[0], config)]
