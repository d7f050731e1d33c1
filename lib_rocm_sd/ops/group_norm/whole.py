"""What kernels/group_norm_whole.hip is compiled with and called with, and for which images.

Needs no torch, so that install.py can use it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache
from math import lcm

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import KernelSpec

SOURCE = "group_norm_whole.hip"
LEAST_RUN = 32
"""Channels of a work-group where an image has so many: 64 bytes of each pixel, which is what AMD's
caches fetch at least.
"""
MOST_GROUPS = 32
"""Most groups of a work-group: no run has more, see `tiling`."""
LARGEST_BYTES = 1 << 31
"""Largest image, in bytes: the kernel counts them with 32 bits."""
SIMDS = 4
"""SIMDs that run one work-group: those of a compute unit, or of a pair of them on RDNA."""
REGISTERS_BESIDE = 64
"""Registers of a work-item besides the values it holds: what compilers take, and some to spare."""


class WholeParams(ctypes.Structure):
    """The argument of group_norm_whole; the same struct stands in group_norm_whole.hip."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("x", "out", "norm", "gamma", "beta", "added")),
        *((name, ctypes.c_uint32) for name in ("channels", "pixels", "group_channels")),
        *((name, ctypes.c_uint32) for name in ("run", "width", "blocks")),
        *((name, ctypes.c_uint32) for name in ("gamma_kind", "beta_kind", "added_stride")),
        ("eps", ctypes.c_float),
    ]


@dataclass(frozen=True)
class WholeConfig:
    """Work-items of a work-group, and vectors of channels that each holds in registers."""

    threads: int
    held: int

    def pixels(self, width: int) -> int:
        """Most that a work-group of so many columns holds."""
        return self.threads // width * self.held


CONFIGS = tuple(
    WholeConfig(*sizes) for sizes in ((256, 4), (256, 8), (512, 8), (512, 12), (512, 32))
)
"""From the smallest on; the first that holds a run is used. Of a UNet's images with 32 groups 8x8
fit the first, 16x16 with 1280 channels the second and with more the third, 32x32 with 320, 640 and
1280 the fourth, with more the last."""


@dataclass(frozen=True)
class WholeTiling:
    """How an image is cut. run: channels of a work-group, width: vectors of these, blocks:
    work-groups of an image.
    """

    run: int
    width: int
    blocks: int


@lru_cache(maxsize=256)
def tiling(channels: int, groups: int, vector: int) -> WholeTiling:
    """The fewest groups that end at a multiple of `vector` channels and have LEAST_RUN of them."""
    least = lcm(channels // groups, vector)
    run = min(channels, least * -(-LEAST_RUN // least))
    return WholeTiling(run, run // vector, -(-channels // run))


def registers(arch: Arch, threads: int) -> int:
    """That a work-item of such a work-group may have."""
    waves = -(-threads // (arch.wave_size * SIMDS))
    return min(arch.max_vgprs, arch.vgprs_per_simd // waves)


def lds_bytes(config: WholeConfig, vector: int) -> int:
    """Mean and sum of squares of each channel of each work-item, and what waves found of groups."""
    return config.threads * vector * 8 + MOST_GROUPS * 16


@lru_cache(maxsize=256)
def configs(
    arch: Arch, channels: int, pixels: int, groups: int, vector: int
) -> tuple[WholeConfig, ...]:
    """The smallest config that holds a run of a channels-last image; none where no one does."""
    if not 0 < channels * pixels * 2 <= LARGEST_BYTES:
        return ()
    width = tiling(channels, groups, vector).width
    return tuple(
        config
        for config in CONFIGS
        if config.pixels(width) >= pixels and fits(arch, config, vector)
    )[:1]


def holds(channels: int, pixels: int, groups: int, vector: int) -> int:
    """Pixels that the smallest config that holds such an image may hold; 0 where no one does."""
    width = tiling(channels, groups, vector).width
    held = (config.pixels(width) for config in CONFIGS)
    return next((most for most in held if most >= pixels), 0)


def fits(arch: Arch, config: WholeConfig, vector: int) -> bool:
    """Whether the GPU has the registers and the LDS."""
    words = config.held * -(-vector // 2)
    enough = words + REGISTERS_BESIDE <= registers(arch, config.threads)
    return enough and lds_bytes(config, vector) <= arch.lds_bytes


@cache
def spec(dtype: str, vector: int, silu: bool, config: WholeConfig) -> KernelSpec:
    """The kernel."""
    defines = {
        "BF16_HALVES": int(dtype == "bfloat16"),
        "VECTOR": vector,
        "SILU": int(silu),
        "HELD": config.held,
        "THREADS": config.threads,
    }
    return KernelSpec(SOURCE, "group_norm_whole", tuple(defines.items()))


def specs(arch: Arch, dtypes: tuple[str, ...]) -> list[KernelSpec]:
    """Every config, with SiLU and without, channels in eights."""
    return [
        spec(dtype, 8, silu, config)
        for dtype in dtypes
        for silu in (True, False)
        for config in CONFIGS
        if fits(arch, config, 8)
    ]
