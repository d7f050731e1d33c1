"""What kernels/attention_backward.hip is compiled with and called with.

Needs no torch, so that install.py can use it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.attention import kernel as attention
from lib_rocm_sd.ops.attention.kernel import MASK_KINDS
from lib_rocm_sd.ops.base import HALVES, KernelSpec

SOURCE = "attention_backward.hip"
ENTRY = "attention_backward"
DTYPES = HALVES
PASSES = ("queries", "keys")
"""In the order of Pass in common/attention_backward.h, and of the launches."""
SHIPPED_HEAD_DIMS = (40, 64, 80, 128, 160)
"""SD1.5 (40, 80, 160), SDXL (64), SD3 and Flux (64, 128). Nobody trains a VAE's mid-block here."""


class BackwardParams(ctypes.Structure):
    """The kernel's one argument, as in common/attention_backward.h. Strides in elements."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("q", "k", "v", "out", "grad", "mask")),
        *((name, ctypes.c_uint64) for name in ("lse", "delta", "q_grad", "k_grad", "v_grad")),
        *((f"{name}_stride", ctypes.c_int64 * 3) for name in ("q", "k", "v", "out", "grad")),
        ("mask_stride", ctypes.c_int64 * 4),
        *((name, ctypes.c_uint32) for name in ("heads", "seq_q", "seq_k", "tiles")),
        *((name, ctypes.c_float) for name in ("scale", "scale2")),
        ("aligned", ctypes.c_uint32),
    ]


@dataclass(frozen=True)
class PassConfig:
    """Tile sizes of one pass; the kernel's head comment says what each means.

    `waves`: side by side over own rows; `waves_d`: over columns. `tiles` and `other_tiles`:
    sixteens of own rows of a wave, and of other rows at once. `block`: other rows at a time, the
    next of which are on their way meanwhile where `ahead`. `held`: which own rows lie in registers,
    1 for q and k, 3 for all. `unroll`: steps of `other_tiles` that the compiler sees at once.
    `groups`: for NVIDIA only.
    """

    waves: int
    block: int
    waves_d: int = 1
    tiles: int = 1
    other_tiles: int = 1
    held: int = 0
    ahead: bool = False
    unroll: int = 1
    groups: int = 1

    @property
    def rows(self) -> int:
        """Own rows of a work-group."""
        return self.waves * self.tiles * 16


@dataclass(frozen=True)
class BackwardConfig:
    """Those of both passes."""

    queries: PassConfig
    keys: PassConfig
    wave_size: int

    def of(self, name: str) -> PassConfig:
        """Config of the pass `name`."""
        return self.keys if name == "keys" else self.queries

    def block(self, name: str) -> int:
        """Work-items of a work-group of a pass."""
        each = self.of(name)
        return each.waves * each.waves_d * self.wave_size


def head_dim_refusals(head_dim: int) -> list[str]:
    """Why the kernel has no form for this head_dim."""
    if head_dim % 8 or head_dim < 8:
        return [f"head_dim {head_dim} is not a multiple of 8"]
    return [f"head_dim {head_dim} is more than 256"] if head_dim > 256 else []


def configs(arch: Arch, head_dim: int) -> tuple[BackwardConfig, ...]:
    """The search space for one head_dim, the safe default first. None spills registers without a
    mask.
    """
    size = arch.wave_size
    if head_dim > 160:
        return (BackwardConfig(PassConfig(2, 16), PassConfig(1, 16, waves_d=4), size),)
    if head_dim > 128:
        return (BackwardConfig(PassConfig(4, 16), PassConfig(2, 16, waves_d=2), size),)
    if not arch.is_amd:
        return tuple(BackwardConfig(*each, size) for each in _development_configs(head_dim))
    few_registers = arch.matrix == "dot2"
    if head_dim > 80:
        held = 3 if arch.matrix == "mfma" else 0
        queries = PassConfig(4, 16 if few_registers else 32, held=held)
        return (BackwardConfig(queries, PassConfig(4, 16, held=held), size),)
    held = 3 if arch.matrix in ("mfma", "wmma_gfx12") else 0
    queries = PassConfig(4, 16 if few_registers and head_dim > 48 else 32, held=held, ahead=True)
    keys = replace(queries, block=16 if few_registers and head_dim > 64 else 32)
    return (BackwardConfig(queries, keys, size),)


def _development_configs(head_dim: int) -> tuple[tuple[PassConfig, PassConfig], ...]:
    """What an NVIDIA card with its many registers may do best with, head_dim up to 128: the first
    for many keys, the next, if any, for a prompt's.
    """
    each = PassConfig(4, 64, held=3, ahead=True, groups=2)
    few = PassConfig(4, 32, held=3, groups=2), replace(each, other_tiles=2, unroll=2)
    if head_dim <= 48:
        pairs = replace(each, tiles=2, other_tiles=2, unroll=2)
        return ((pairs, pairs), few)
    if head_dim <= 64:
        queries = replace(each, tiles=2, unroll=4)
        return ((queries, PassConfig(4, 128, tiles=2, held=1, unroll=8, groups=2)), few)
    if head_dim <= 80:
        queries = PassConfig(4, 64, tiles=2, held=3, unroll=4, groups=2)
        keys = PassConfig(4, 128, other_tiles=2, held=3, unroll=4, groups=2)
        return ((queries, keys),)
    both = PassConfig(4, 64, held=3, unroll=4)
    return ((both, both),)


@cache
def spec(dtype: str, head_dim: int, mask: str, name: str, config: BackwardConfig) -> KernelSpec:
    """The kernel of one pass for one half type, head_dim and mask kind; ValueError where there is
    none.
    """
    problems = head_dim_refusals(head_dim)
    if dtype not in DTYPES:
        problems.append(f"dtype {dtype} is not one of {', '.join(DTYPES)}")
    if problems:
        raise ValueError("; ".join(problems))
    each = config.of(name)
    defines = {
        "BF16_HALVES": int(dtype == "bfloat16"),
        "HEAD_DIM": head_dim,
        "MASK_KIND": MASK_KINDS.index(mask),
        "PASS": PASSES.index(name),
        "WAVES_N": each.waves,
        "WAVES_D": each.waves_d,
        "N_TILES": each.tiles,
        "M_TILES": each.other_tiles,
        "BLOCK_M": each.block,
        "HELD": each.held,
        "AHEAD": int(each.ahead),
        "UNROLL": each.unroll,
        "MIN_GROUPS": each.groups,
    }
    return KernelSpec(SOURCE, ENTRY, tuple(defines.items()))


def specs(dtype: str, head_dim: int, mask: str, config: BackwardConfig) -> tuple[KernelSpec, ...]:
    """Kernels of all passes, in their order."""
    return tuple(spec(dtype, head_dim, mask, name, config) for name in PASSES)


def shipped_specs(arch: Arch) -> list[KernelSpec]:
    """What is compiled ahead for a GPU: both half types, every usual head_dim, no mask; the forward
    pass that leaves the log-sum-exp, then both of the backward pass.
    """
    return [
        each
        for dtype in DTYPES
        for head_dim in SHIPPED_HEAD_DIMS
        for each in (
            *forward_specs(arch, dtype, head_dim),
            *specs(dtype, head_dim, "none", configs(arch, head_dim)[0]),
        )
    ]


def forward_specs(arch: Arch, dtype: str, head_dim: int) -> list[KernelSpec]:
    """Kernels of the forward pass with the log-sum-exp, for many keys and for few; no mask."""
    first, *others = attention.ordered(arch, dtype, head_dim)
    few = [config for config in others if config.for_few_keys]
    return [attention.spec(dtype, head_dim, "none", each, lse=True) for each in (first, *few)]


def searched_specs(arch: Arch) -> list[KernelSpec]:
    """Every config of the search space for the usual head_dims, float16, no mask."""
    return [
        each
        for head_dim in SHIPPED_HEAD_DIMS
        for config in configs(arch, head_dim)
        for each in specs("float16", head_dim, "none", config)
    ]
