"""What kernels/attention_backward.hip is compiled with and called with.

Needs no torch, so that install.py can use it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

from lib_rocm_sd.arch import Arch
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
class BackwardConfig:
    """Tile sizes of both passes; the kernel's head comment says what each means.

    `waves`: side by side over own rows, in kQueries; `key_waves` and `key_waves_d` are
    those of kKeys. `tiles` and `other_tiles`: sixteens of own rows of a wave, and of other rows at
    once. `key_block`, `query_block`: other rows at a time, of each pass.
    `held_keys`, `held_queries`: own rows lie in registers. `groups`: for NVIDIA only.
    """

    waves: int
    key_waves: int
    key_waves_d: int
    tiles: int
    other_tiles: int
    key_block: int
    query_block: int
    held_keys: bool
    held_queries: bool
    wave_size: int
    ahead: bool = False
    groups: int = 1

    def rows(self, name: str) -> int:
        """Own rows of a work-group of a pass."""
        return (self.key_waves if name == "keys" else self.waves) * self.tiles * 16

    def block(self, name: str) -> int:
        """Work-items of a work-group of a pass."""
        waves = self.key_waves * self.key_waves_d if name == "keys" else self.waves
        return waves * self.wave_size


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
        return (BackwardConfig(2, 1, 4, 1, 1, 16, 16, False, False, size),)
    if head_dim > 128:
        return (BackwardConfig(4, 2, 2, 1, 1, 16, 16, False, False, size),)
    if not arch.is_amd:
        return _development_configs(head_dim, size)
    few_registers = arch.matrix == "dot2"
    if head_dim > 80:
        held, block = arch.matrix == "mfma", 16 if few_registers else 32
        return (BackwardConfig(4, 4, 1, 1, 1, 16, block, held, held, size),)
    held = arch.matrix in ("mfma", "wmma_gfx12")
    block = 16 if few_registers and head_dim > 64 else 32
    return (BackwardConfig(4, 4, 1, 1, 1, block, block, held, held, size, True),)


def _development_configs(head_dim: int, size: int) -> tuple[BackwardConfig, ...]:
    """What an NVIDIA card with its many registers may do best with, head_dim up to 128: the first
    for many keys, the next, if any, for a prompt's.
    """

    def even(
        tiles: int, others: int, held: tuple[bool, bool], groups: int = 2, block: int = 64
    ) -> BackwardConfig:
        return BackwardConfig(4, 4, 1, tiles, others, block, block, *held, size, True, groups)

    if head_dim <= 48:
        return (even(2, 2, (True, True)), even(1, 4, (True, True)))
    if head_dim <= 64:
        return (even(2, 1, (False, True)), even(1, 4, (True, True)))
    if head_dim <= 80:
        return (even(1, 2, (True, True)),)
    return (even(1, 2, (False, False), 1, 32), even(1, 1, (False, True), 2, 32))


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
    of_keys = name == "keys"
    defines = {
        "BF16_HALVES": int(dtype == "bfloat16"),
        "HEAD_DIM": head_dim,
        "MASK_KIND": MASK_KINDS.index(mask),
        "PASS": PASSES.index(name),
        "WAVES_N": config.key_waves if of_keys else config.waves,
        "WAVES_D": config.key_waves_d if of_keys else 1,
        "N_TILES": config.tiles,
        "M_TILES": config.other_tiles,
        "BLOCK_M": config.key_block if of_keys else config.query_block,
        "OWN_IN_LDS": int(not (config.held_keys if of_keys else config.held_queries)),
        "AHEAD": int(config.ahead),
        "MIN_GROUPS": config.groups,
    }
    return KernelSpec(SOURCE, ENTRY, tuple(defines.items()))


def specs(dtype: str, head_dim: int, mask: str, config: BackwardConfig) -> tuple[KernelSpec, ...]:
    """Of all passes, in their order."""
    return tuple(spec(dtype, head_dim, mask, name, config) for name in PASSES)


def shipped_specs(arch: Arch) -> list[KernelSpec]:
    """What is compiled ahead for a GPU: both half types, every usual head_dim, no mask."""
    return [
        each
        for dtype in DTYPES
        for head_dim in SHIPPED_HEAD_DIMS
        for each in specs(dtype, head_dim, "none", configs(arch, head_dim)[0])
    ]


def searched_specs(arch: Arch) -> list[KernelSpec]:
    """Every config of the search space for the usual head_dims, float16, no mask."""
    return [
        each
        for head_dim in SHIPPED_HEAD_DIMS
        for config in configs(arch, head_dim)
        for each in specs("float16", head_dim, "none", config)
    ]
