"""How convolutions are cut whose weights are read as they lie: a UNet's. Needs no torch.

A weight (Co, Ci, 3, 3) in channels-last memory is a matrix (Co, 9 Ci); see common/conv_rows.h.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache

from lib_rocm_sd.arch import Arch, table
from lib_rocm_sd.ops.conv import kernel
from lib_rocm_sd.ops.conv.kernel import STRIDED, ConvConfig
from lib_rocm_sd.ops.conv.problem import ConvProblem

LEAST_CHUNK = 16
"""Input channels come in so many."""
MOST_WEIGHT_BYTES = 1 << 31
"""A weight's rows are addressed by 32 bits."""

_Size = tuple[int, int, int, int, int]
_SIZES: dict[str, tuple[_Size, ...]] = {
    "dot2": ((2, 2, 2, 4, 32), (4, 2, 2, 4, 32)),
    "fma": ((2, 4, 2, 2, 32), (4, 4, 2, 2, 32)),
    "wmma_gfx11": ((2, 4, 5, 2, 32), (2, 4, 4, 2, 64)),
    "wmma_gfx12": ((2, 4, 5, 2, 32), (4, 2, 4, 4, 32), (2, 4, 4, 2, 64)),
    "mfma": ((2, 4, 5, 4, 32), (2, 4, 5, 2, 32), (2, 4, 4, 2, 64)),
    "mma_sm80": (
        *((2, 4, 5, 4, 32), (2, 2, 5, 4, 32), (2, 4, 5, 2, 64), (2, 4, 4, 4, 64)),
        (2, 2, 5, 2, 64),
    ),
}
"""Waves along channels and pixels, tiles of a wave likewise, input channels at a time, by matrix
unit. Blocks of 160 channels: all widths of Stable Diffusion's UNets are multiples of it."""
_STRIDED: dict[str, tuple[_Size, ...]] = {
    "dot2": ((2, 2, 2, 2, 32),),
    "fma": ((2, 4, 2, 1, 32),),
    "wmma_gfx11": ((2, 4, 5, 1, 32),),
    "wmma_gfx12": ((2, 4, 5, 1, 32),),
    "mfma": ((2, 4, 5, 1, 32),),
    "mma_sm80": ((2, 4, 5, 2, 32), (2, 2, 5, 2, 32)),
}
"""The same in steps of two pixels, of which a work-group stages four times as many."""
_FEW = (1, 4, 1, 2, 32)
_FEW_STRIDED = (1, 4, 1, 1, 32)
"""For sixteen channels or less."""


def chunk_of(p: ConvProblem) -> int:
    """The most input channels that can be staged at a time; 0 where not even LEAST_CHUNK can."""
    both = (p.in_channels, p.through)
    return next((c for c in (64, 32, LEAST_CHUNK) if not any(n % c for n in both)), 0)


@lru_cache(maxsize=1024)
def configs(arch: Arch, problem: ConvProblem) -> tuple[ConvConfig, ...]:
    """The search space: first what computes least beyond what is wanted. Where there are few
    work-groups, each config comes split first, then as it is.
    """
    p = problem
    if not chunk_of(p):
        return ()
    strided = p.kind in STRIDED
    no_dot = arch.matrix == "dot2" and p.dtype == "bfloat16"  # more instructions and registers
    sizes = (_STRIDED if strided else _SIZES)["fma" if no_dot else arch.matrix]
    if p.out_channels <= 16:
        sizes = (_FEW_STRIDED if strided else _FEW,)
    whole = _by_work(arch, p, sizes)
    every: list[ConvConfig] = []
    for config in dict.fromkeys(whole):
        count = _splits(p, config, kernel.wanted_groups(arch))
        first = config is whole[0] and count > 1
        counts = (count, 2 * count, count // 2, 1) if first else (count, 1)
        every += [replace(config, splits=n) for n in counts if 1 <= n <= _most(p)]
    return tuple(dict.fromkeys(every))


def _by_work(arch: Arch, p: ConvProblem, sizes: tuple[_Size, ...]) -> list[ConvConfig]:
    """Unsplit; first what computes fewest pixels times channels, those beyond the image and the
    weights among them. Equals keep their order.
    """
    most = chunk_of(p)
    whole = [ConvConfig(*size[:4], arch.wave_size, 0, chunk_c=min(size[4], most)) for size in sizes]
    return sorted(whole, key=lambda c: _groups(c, p) * c.rows * c.block_co)


def _groups(config: ConvConfig, p: ConvProblem) -> int:
    cut = kernel.tiling("3x3", *p.out_size, p.out_channels, config)
    return max(1, p.batch * cut.parts * cut.blocks_co)


def _most(p: ConvProblem) -> int:
    return max(1, min(kernel.MOST_SPLITS, p.in_channels // kernel.LEAST_CHANNELS))


def _splits(p: ConvProblem, config: ConvConfig, wanted: int) -> int:
    """So that there are at most so many work-groups; 1: none."""
    return max(1, min(_most(p), wanted // _groups(config, p)))


@lru_cache(maxsize=1024)
def most_splits(problem: ConvProblem) -> int:
    """Most splits of a config that runs unmeasured, on any card, in steps of one pixel."""
    count = 1
    for arch in _one_of_each() if chunk_of(problem) else ():
        sizes = (_FEW,) if problem.out_channels <= 16 else _SIZES[arch.matrix]
        config = _by_work(arch, problem, sizes)[0]
        count = max(count, _splits(problem, config, kernel.wanted_groups(arch)))
    return count


@cache
def _one_of_each() -> tuple[Arch, ...]:
    """A GPU with each kind of matrix unit; graphics within a processor apart."""
    return tuple({arch.matrix: arch for arch in table().values() if not arch.integrated}.values())
