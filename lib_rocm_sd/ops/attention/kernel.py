"""What kernels/attention.hip is compiled with and called with.

Needs no torch, so that install.py can use it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops import tuned
from lib_rocm_sd.ops.base import HALVES, KernelSpec

OP = "attention"
SOURCE = "attention.hip"
ENTRY = "attention_forward"
DTYPES = HALVES
MASK_KINDS = ("none", "bool", "float16", "bfloat16", "float32")
"""In the order of MaskKind in common/attention_layout.h."""
LENGTHS = "int32"
"""The mask says how many of the first keys count, for each image."""
UNBIASED = ("none", LENGTHS)
"""With these a pass over a whole tile of keys is the same."""
FEW_KEYS = 80
"""Keys of the tile that is made for a prompt, which has 77 or a multiple."""
SHIPPED_HEAD_DIMS = (40, 64, 80, 128, 160, 512)
"""SD1.5 (40, 80, 160), SDXL (64), SD3 and Flux (64, 128), the VAE's mid-block (512)."""


class AttentionParams(ctypes.Structure):
    """The kernel's one argument, as in common/attention_layout.h. Strides in elements."""

    _fields_ = [
        ("q", ctypes.c_uint64),
        ("k", ctypes.c_uint64),
        ("v", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("mask", ctypes.c_uint64),
        ("q_stride", ctypes.c_int64 * 3),
        ("k_stride", ctypes.c_int64 * 3),
        ("v_stride", ctypes.c_int64 * 3),
        ("mask_stride", ctypes.c_int64 * 4),
        ("heads", ctypes.c_uint32),
        ("seq_q", ctypes.c_uint32),
        ("seq_k", ctypes.c_uint32),
        ("batch_heads", ctypes.c_uint32),
        ("scale", ctypes.c_float),
        ("flip", ctypes.c_uint32),
        ("aligned", ctypes.c_uint32),
        ("head_groups", ctypes.c_uint32),
        ("lse", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class AttentionConfig:
    """Tile sizes of attention.hip; its head comment says what each means.

    `groups`: how many work-groups' registers must fit a compute unit; for NVIDIA only.
    """

    waves_q: int
    waves_d: int
    q_tiles: int
    block_k: int
    q_in_lds: bool
    chunk_d: int
    chunk_k: int
    wave_size: int
    ahead: bool = False
    groups: int = 1

    @property
    def block_q(self) -> int:
        """Queries of one work-group."""
        return self.waves_q * self.q_tiles * 16

    def tiles(self, seq_q: int) -> int:
        """Tiles of so many queries of one head; as a rule each is a work-group."""
        return -(-seq_q // self.block_q)

    @property
    def for_few_keys(self) -> bool:
        """Whether its tile was made for a prompt's keys."""
        return self.block_k == FEW_KEYS

    @property
    def resident(self) -> bool:
        """Whether a work-group may keep K and V in LDS for several tiles of queries, where one tile
        has all keys. Only NVIDIA's configs say `groups`, and only there the kernel does it.
        """
        return self.for_few_keys and self.groups > 1

    @property
    def block(self) -> int:
        """Work-items of one work-group."""
        return self.waves_q * self.waves_d * self.wave_size


def head_dim_refusals(head_dim: int) -> list[str]:
    """Why the kernel has no form for this head_dim."""
    if head_dim % 8 or head_dim < 8:
        return [f"head_dim {head_dim} is not a multiple of 8"]
    if head_dim > 256 and head_dim != 512:
        return [f"head_dim {head_dim} is neither 512 nor at most 256"]
    return []


def configs(arch: Arch, head_dim: int) -> tuple[AttentionConfig, ...]:
    """The search space for one head_dim, the safe default first.

    None of the defaults spills registers.
    """
    padded = (head_dim + 15) // 16 * 16
    few_registers = arch.matrix == "dot2"

    def whole(
        waves_q: int,
        waves_d: int,
        block_k: int,
        q_in_lds: bool,
        q_tiles: int = 1,
        ahead: bool = False,
        groups: int = 1,
        chunk_d: int = padded,
        chunk_k: int | None = None,
    ) -> AttentionConfig:
        chunks = (chunk_d, chunk_k or block_k, arch.wave_size)
        return AttentionConfig(waves_q, waves_d, q_tiles, block_k, q_in_lds, *chunks, ahead, groups)

    if head_dim > 256:
        parts = [whole(2, 4, 64, True, chunk_d=each, chunk_k=16) for each in (128, 64)]
        if arch.lds_bytes < 194 << 10:
            return tuple(parts)
        copied, narrow = (
            whole(1, 8, 256, True, q_tiles, True, chunk_d=64, chunk_k=32) for q_tiles in (4, 2)
        )
        return (copied, narrow, *parts)
    if head_dim > 160:
        return (whole(2, 2, 32, True),)
    if arch.matrix == "mma_sm80":
        return _development_configs(arch, head_dim, whole)
    if head_dim > 128 or (few_registers and head_dim > 80):
        return (whole(4, 1, 32, few_registers), whole(2, 2, 32, True), whole(4, 1, 32, True))
    if few_registers:
        return (whole(4, 1, 64, False), whole(8, 1, 64, False), whole(4, 1, 32, False))
    few = (whole(8, 1, FEW_KEYS, False),) if head_dim <= 80 else ()  # above, LLVM 22 spills it
    return (*_matrix_configs(arch, head_dim, whole), *few)


def configs_for_many_keys(arch: Arch, head_dim: int) -> tuple[AttentionConfig, ...]:
    """Those among which kernels/tuned chooses."""
    return tuple(config for config in configs(arch, head_dim) if not config.for_few_keys)


def leaves_idle(config: AttentionConfig, groups: int) -> bool:
    """Whether so many work-groups leave much of an H200 idle: they are few, or, where it holds
    several on a multiprocessor, the last of them would have it to themselves.
    """
    at_once = 132 * config.groups
    return groups < 100 or (config.groups > 1 and at_once < groups < 1.4 * at_once)


def narrower(arch: Arch, space: Sequence[AttentionConfig]) -> AttentionConfig | None:
    """What makes more work-groups than the first config, if any does; on the development card
    alone, where it was measured.
    """
    if arch.is_amd:
        return None
    fits = (c for c in space if c.block_q < space[0].block_q and not c.for_few_keys)
    return next(fits, None)


def _matrix_configs(
    arch: Arch, head_dim: int, whole: Callable[..., AttentionConfig]
) -> tuple[AttentionConfig, ...]:
    """For AMD's matrix units and many keys, head_dim up to 128. What spills as clang 19 or 22
    compiles it is left out; what spills only with a mask is not the default.
    """
    four, eight, short = whole(4, 1, 64, False), whole(8, 1, 64, False), whole(4, 1, 32, False)
    ahead = whole(8, 1, 32, False, ahead=True)
    if arch.matrix == "mfma":
        return (eight, four, short, ahead)
    if arch.matrix == "wmma_gfx11" and arch.vgprs_per_simd < 1536 and 48 < head_dim <= 64:
        return (ahead, short)
    if head_dim <= 64:
        return (eight, four, short, ahead)
    if arch.matrix == "wmma_gfx12" and head_dim <= 80:
        return (ahead, eight, short)
    return (eight, short, ahead)


def _development_configs(
    arch: Arch, head_dim: int, whole: Callable[..., AttentionConfig]
) -> tuple[AttentionConfig, ...]:
    """What an NVIDIA card with its many registers does best with, head_dim up to 160; the last for
    few keys.
    """
    pairs = whole(4, 1, 32, False, 2, True, 2)
    if head_dim <= 48:
        few = whole(4, 1, FEW_KEYS, True, groups=5)
        return (whole(4, 1, 48, False, 2, True, 2), pairs, few)
    single = whole(4, 1, 32, False, 1, True, 3)
    if head_dim <= 64:
        return (pairs, single, whole(4, 1, FEW_KEYS, True, groups=5))
    if head_dim <= 80:
        return (pairs, single, whole(8, 1, FEW_KEYS, True, groups=2))
    few = whole(4, 1, FEW_KEYS, True, groups=2)
    if head_dim <= 128:
        two, three = whole(4, 1, 32, True, 2, True, 2), whole(4, 1, 32, True, 1, True, 3)
        return (two, three, few)
    if arch.lds_bytes < 128 << 10:  # too little for rings
        return (whole(8, 1, 32, False), few)
    return (whole(8, 1, 32, False, 1, True), whole(4, 1, 32, False, 1, True, 2), few)


@cache
def spec(
    dtype: str, head_dim: int, mask: str, config: AttentionConfig, lse: bool = False
) -> KernelSpec:
    """The kernel for one half type, head_dim and mask kind; ValueError where there is none. `lse`:
    it leaves each query's log-sum-exp too.
    """
    problems = head_dim_refusals(head_dim)
    if dtype not in DTYPES:
        problems.append(f"dtype {dtype} is not one of {', '.join(DTYPES)}")
    if problems:
        raise ValueError("; ".join(problems))
    defines = {
        "BF16_HALVES": int(dtype == "bfloat16"),
        "HEAD_DIM": head_dim,
        "MASK_KIND": 0 if mask == LENGTHS else MASK_KINDS.index(mask),
        "WAVES_Q": config.waves_q,
        "WAVES_D": config.waves_d,
        "Q_TILES": config.q_tiles,
        "BLOCK_K": config.block_k,
        "Q_IN_LDS": int(config.q_in_lds),
        "CHUNK_D": config.chunk_d,
        "CHUNK_K": config.chunk_k,
        "AHEAD": int(config.ahead),
        "MIN_GROUPS": config.groups,
    }
    if lse:
        defines["LEAVES_LSE"] = 1
    if mask == LENGTHS:
        defines["KEY_LENGTHS"] = 1
    return KernelSpec(SOURCE, ENTRY, tuple(defines.items()))


def fields_of(config: AttentionConfig) -> dict[str, int | bool]:
    """As a table of kernels/tuned has it."""
    return asdict(config)


def form(dtype: str, head_dim: int, mask: str = "none") -> dict[str, str | int]:
    """What of a problem a choice in kernels/tuned is for."""
    return {"dtype": dtype, "head_dim": head_dim, "mask": mask}


def choice(arch: Arch, dtype: str, head_dim: int) -> tuned.Choice:
    """What kernels/tuned chooses; ValueError where there is no kernel."""
    space = configs(arch, head_dim)
    defines = [name for name, _ in spec(dtype, head_dim, "none", space[0]).defines]
    return tuned.choice(arch.gfx, OP, form(dtype, head_dim), space, defines)


def ordered(arch: Arch, dtype: str, head_dim: int, mask: str = "none") -> list[AttentionConfig]:
    """The search space, first what kernels/tuned chooses, else the safe default."""
    space = configs(arch, head_dim)
    if head_dim not in SHIPPED_HEAD_DIMS or dtype not in DTYPES or mask not in UNBIASED:
        return list(space)  # the tables have no others
    chosen = choice(arch, dtype, head_dim).config
    return list(dict.fromkeys((chosen, *space) if chosen else space))


def table_reasons(arch: Arch) -> list[str]:
    """Why the GPU's table in kernels/tuned, or a part of it, is ignored."""
    choices = [choice(arch, dtype, each) for dtype in DTYPES for each in SHIPPED_HEAD_DIMS]
    return list(dict.fromkeys(reason for each in choices for reason in each.reasons))


def shipped_specs(arch: Arch) -> list[KernelSpec]:
    """What is compiled ahead for a GPU: both half types, every usual head_dim, many keys and few,
    no mask.
    """
    found = []
    for dtype in DTYPES:
        for head_dim in SHIPPED_HEAD_DIMS:
            first, *others = ordered(arch, dtype, head_dim)
            few = [config for config in others if config.for_few_keys]
            found += [spec(dtype, head_dim, "none", config) for config in (first, *few)]
    return found


def searched_specs(arch: Arch) -> list[KernelSpec]:
    """Every config of the search space for the usual head_dims, float16, no mask."""
    return [
        spec("float16", head_dim, "none", config)
        for head_dim in SHIPPED_HEAD_DIMS
        for config in configs(arch, head_dim)
    ]
