"""What conv3x3.hip, upsample_conv.hip, conv_sum.hip and pack.hip are compiled with and called with;
no torch.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.conv.problem import ACTIVATIONS, ConvProblem

VAE_KINDS = ("3x3", "3x3 stride 2", "upsample")
KINDS = (*VAE_KINDS, "3x3 stride 2 padded")
STRIDED = ("3x3 stride 2", "3x3 stride 2 padded")
"""Padded by 0 before and 1 after, and by 1 on all sides; both run the same code."""
SHORTCUTS = ("none", "identity", "conv")
"""In the order of Shortcut in common/conv.h."""


class ConvParams(ctypes.Structure):
    """The one argument of the convolutions; the same struct stands in common/conv.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("in_", "weights", "bias", "norm", "shortcut")),
        *((name, ctypes.c_uint64) for name in ("shortcut_weights", "out", "statistics")),
        ("overflow", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("h", "w", "ci", "out_h", "out_w", "co")),
        *((name, ctypes.c_uint32) for name in ("out_channels", "shortcut_ci")),
        *((name, ctypes.c_uint32) for name in ("in_stride", "shortcut_stride", "out_stride")),
        *((name, ctypes.c_uint32) for name in ("tiles_x", "tiles_y", "blocks_co")),
        *((name, ctypes.c_uint32) for name in ("image_h", "image_w")),
        *((name, ctypes.c_uint32) for name in ("above", "padding", "bias_stride", "splits")),
        ("weight_rows", ctypes.c_uint32),
    ]


class EpilogueParams(ctypes.Structure):
    """The argument with EPILOGUE; the same struct stands in common/conv.h."""

    _fields_ = [
        *ConvParams._fields_,
        *((name, ctypes.c_uint64) for name in ("slopes", "second")),
        *((name, ctypes.c_float) for name in ("slope", "scale", "second_scale")),
        ("second_stride", ctypes.c_uint32),
    ]


class ConvSumParams(ctypes.Structure):
    """The one argument of conv_sum; the same struct stands in conv_sum.hip."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("sums", "bias", "shortcut", "out")),
        *((name, ctypes.c_uint64) for name in ("statistics", "overflow")),
        *((name, ctypes.c_uint32) for name in ("splits", "pixels", "co", "out_channels")),
        *((name, ctypes.c_uint32) for name in ("parts", "blocks_co", "bias_stride")),
        *((name, ctypes.c_uint32) for name in ("shortcut_stride", "out_stride")),
    ]


SUM_PIXELS, SUM_CHANNELS = 16, 64
"""Pixels and channels of a work-group of conv_sum.hip."""
SUM_THREADS = SUM_PIXELS * SUM_CHANNELS // 4
"""Work-items of such a work-group, each of which makes four channels of a pixel."""


class PackParams(ctypes.Structure):
    """The one argument of pack_tiles; the same struct stands in pack.hip."""

    _fields_ = [("tiles", ctypes.c_uint64), ("packed", ctypes.c_uint64)]


@dataclass(frozen=True)
class ConvConfig:
    """Tile sizes of a convolution; common/conv.h says what each means."""

    waves_co: int
    waves_pix: int
    tiles_co: int
    tiles_pix: int
    wave_size: int
    tile_halves: int
    """Halves that one 16 x 16 tile of packed weights takes."""
    splits: int = 1
    """Work-groups that share the channels of the input; more than one: conv_sum adds theirs."""
    chunk_c: int = 0
    """Input channels that are staged at a time; 0: as many as packed weights have."""

    @property
    def block(self) -> int:
        """Work-items of one work-group."""
        return self.waves_co * self.waves_pix * self.wave_size

    @property
    def block_co(self) -> int:
        """Output channels of one work-group."""
        return self.waves_co * self.tiles_co * 16

    @property
    def rows(self) -> int:
        """Pixel rows of one work-group; each is 16 pixels wide."""
        return self.waves_pix * self.tiles_pix


def padded(out_channels: int) -> int:
    """To whole tiles."""
    return -(-out_channels // 16) * 16


def chunk_of(in_channels: int, kind: str = "3x3") -> int:
    """Input channels that are staged at a time; `in_channels` is a multiple of 16.

    With stride 2 a patch has four times the pixels, and two work-groups shall fit a CU.
    """
    return 16 if kind in STRIDED or in_channels % 32 else 32


def configs(arch: Arch, problem: ConvProblem) -> tuple[ConvConfig, ...]:
    """The search space for packed weights, the safe default first. None of the defaults spills
    registers. In place, with a 1x1 shortcut, one work-group must make all channels of its pixels.
    """
    p, out_channels = problem, problem.out_channels
    tile_halves = 512 if arch.matrix == "dot2" else 256  # dot2 holds each row twice

    def of(waves_co: int, waves_pix: int, tiles_co: int, tiles_pix: int) -> ConvConfig:
        return ConvConfig(waves_co, waves_pix, tiles_co, tiles_pix, arch.wave_size, tile_halves)

    if out_channels <= 16:
        return (of(1, 4, 1, 1 if p.kind in STRIDED else 2),)
    if p.kind in STRIDED:
        return (of(2, 2, 4 if arch.matrix.startswith(("wmma", "mfma")) else 2, 2),)
    no_dot = arch.matrix == "dot2" and p.dtype == "bfloat16"  # more instructions and registers
    unit = "fma" if no_dot else arch.matrix
    sizes = _SIZES[unit]
    if p.epilogue is not None and out_channels <= 64:
        return tuple(of(*each) for each in _NARROW[unit][out_channels > 32])
    if arch.matrix == "mma_sm80" and out_channels % 256 == 0:
        sizes = ((4, 1, 4, 4), *sizes)
    found = [of(*each) for each in sizes]
    if arch.is_amd:
        found.sort(key=lambda config: _rank(config, out_channels))
    if p.in_place and p.shortcut == "conv":
        found = [*found, *(of(*each) for each in _WIDEST[arch.matrix])]
        found = [config for config in found if config.block_co >= out_channels][:1]
    return tuple(found)


def _rank(config: ConvConfig, out_channels: int) -> tuple[bool, bool, int]:
    """What is staged shall serve as many channels as there are; more than a quarter beyond them,
    as 512 for a UNet's 320, costs more than that saves.
    """
    beyond = -out_channels % config.block_co
    return 4 * beyond > out_channels, config.block_co > out_channels, -config.block_co


_SIZES = {
    "dot2": ((2, 2, 2, 4), (4, 2, 2, 4), (8, 2, 2, 4)),
    "fma": ((2, 4, 2, 2), (4, 4, 2, 2), (8, 2, 2, 2)),
    "wmma_gfx11": ((2, 4, 4, 2), (4, 4, 4, 2)),
    "wmma_gfx12": ((2, 2, 4, 4), (4, 2, 4, 4)),
    "mfma": ((2, 2, 4, 4), (4, 2, 4, 4)),
    "mma_sm80": ((4, 1, 2, 4), (4, 2, 2, 2)),
}
"""Waves along channels and pixels, then tiles of a wave likewise, by matrix unit."""
_NARROW = {
    "dot2": (((1, 4, 2, 2), (1, 4, 2, 4)), ((2, 2, 2, 4), (2, 4, 2, 2))),
    "fma": (((1, 4, 2, 2),), ((2, 4, 2, 2),)),
    "wmma_gfx11": (((1, 4, 2, 2), (1, 4, 2, 4)), ((2, 2, 2, 4), (2, 4, 2, 2))),
    "wmma_gfx12": (((1, 4, 2, 2), (1, 4, 2, 4)), ((2, 2, 2, 4), (2, 4, 2, 2))),
    "mfma": (((1, 4, 2, 2),), ((2, 4, 2, 2), (2, 2, 2, 4))),
    "mma_sm80": (((1, 2, 2, 4), (1, 4, 2, 2)), ((2, 2, 2, 4), (1, 4, 4, 3))),
}
"""The same for up to 32, and for up to 64 channels with an epilogue, as upscalers have. A wave
reads its weights once for all its pixels: on the development card, which waits for them, it has
more. Measured there, a H200, 1024x1024 pixels, 160 to 32 channels: two such waves take 0.32 ms,
four 0.65, and four with half the pixels 0.37.
"""
_WIDEST = {
    "dot2": ((8, 1, 4, 2),),
    "wmma_gfx11": ((8, 1, 4, 2),),
    "wmma_gfx12": ((8, 1, 4, 4),),
    "mfma": ((8, 1, 4, 4),),
    "mma_sm80": ((4, 2, 4, 2), (8, 1, 4, 2)),
}
"""For what only a work-group that makes all channels can do."""


@dataclass(frozen=True)
class ConvTiling:
    """How a launch is cut: `rows` x `columns` of each of `phases`, work-groups along each side."""

    phases: int
    rows: int
    columns: int
    tiles_x: int
    tiles_y: int
    blocks_co: int

    @property
    def parts(self) -> int:
        """Parts of the statistics: one for each work-group that makes other pixels."""
        return self.phases * self.tiles_x * self.tiles_y


def tiling(kind: str, rows: int, columns: int, co: int, config: ConvConfig) -> ConvTiling:
    """The work-groups that make `co` channels of (rows, columns). Upsampling whose weights are read
    as they lie is cut as a "3x3" is.
    """
    step = 2 if kind == "upsample" else 1
    rows, columns = rows // step, columns // step
    tiles = (-(-columns // 16), -(-rows // config.rows))
    return ConvTiling(step * step, rows, columns, *tiles, -(-co // config.block_co))


LEAST_ROWS = 4
"""Fewest rows of a work-group, in any config."""
LEAST_CHANNELS = 64
"""Fewest input channels per work-group: while some are multiplied, others are being loaded."""
MOST_SPLITS = 16
"""To add more takes longer than they save."""
GROUPS = {"mma_sm80": 264, "mfma": 304}
GROUPS_OTHERWISE, GROUPS_INTEGRATED = 192, 32
"""Work-groups that keep a card busy. The table of cards has no number of compute units, in which
cards of one row differ."""


def wanted_groups(arch: Arch) -> int:
    """That keep a card busy."""
    otherwise = GROUPS_INTEGRATED if arch.integrated else GROUPS_OTHERWISE
    return GROUPS.get(arch.matrix, otherwise)


def statistics_bytes(
    kind: str, rows: int, columns: int, out_channels: int, group_rows: int = LEAST_ROWS
) -> int:
    """Device memory for the statistics of one image (rows, columns, out_channels) that is made.

    By work-groups that make `group_rows` rows, ConvConfig.rows, by default of the config that needs
    most: a part for each work-group's pixels, then one for each row of work-groups.
    """
    step = 2 if kind == "upsample" else 1
    tiles_x, tiles_y = -(-columns // (16 * step)), -(-rows // (group_rows * step))
    return 16 * step * step * tiles_y * (tiles_x + 1) * (-(-out_channels // 16) * 16)


@lru_cache(maxsize=4096)
def spec(problem: ConvProblem, config: ConvConfig) -> KernelSpec:
    """The kernel of a problem and config. Of one that is split, conv_sum does what comes after."""
    p = problem
    if config.splits > 1:
        shortcut = "conv" if p.shortcut == "conv" else "none"
        p = replace(p, shortcut=shortcut, statistics=False)
    defines = {
        "BF16_HALVES": int(p.dtype == "bfloat16"),
        "NORM": int(p.norm),
        "SHORTCUT": SHORTCUTS.index(p.shortcut),
        "STATISTICS": int(p.statistics),
        "CHUNK_C": config.chunk_c or chunk_of(p.in_channels, p.kind),
        "WAVES_CO": config.waves_co,
        "WAVES_PIX": config.waves_pix,
        "TILES_CO": config.tiles_co,
        "TILES_PIX": config.tiles_pix,
        **({"SPLIT_K": 1} if config.splits > 1 else {}),
        **({"WEIGHTS_IN_ROWS": 1} if p.in_rows else {}),
        **({} if p.epilogue is None else {"EPILOGUE": 1 + ACTIVATIONS.index(p.epilogue)}),
    }
    if p.kind == "upsample":
        return KernelSpec("upsample_conv.hip", "upsample_conv", tuple(defines.items()))
    defines["CONV_STRIDE"] = 2 if p.kind in STRIDED else 1
    return KernelSpec("conv3x3.hip", "conv3x3", tuple(defines.items()))


@cache
def sum_spec(dtype: str) -> KernelSpec:
    """The kernel that adds what the splits of a convolution made."""
    return KernelSpec("conv_sum.hip", "conv_sum", (("BF16_HALVES", int(dtype == "bfloat16")),))


@cache
def pack_spec(dtype: str) -> KernelSpec:
    """The kernel that puts weights into the order of the matrix unit's lanes."""
    return KernelSpec("pack.hip", "pack_tiles", (("BF16_HALVES", int(dtype == "bfloat16")),))


def _problem(kind: str, taken: int, out: int, **fused: Any) -> ConvProblem:
    """A problem of some size: nothing here depends on it."""
    return ConvProblem(kind, 1, 64, 64, taken, out, **fused)


def vae_problems() -> list[ConvProblem]:
    """What Stable Diffusion's decoder and encoder launch."""
    problems: list[ConvProblem] = []
    for statistics in (True, False):  # of a band that is made again nobody wants statistics
        problems += [
            _problem("3x3", 16, 512, statistics=statistics),  # the decoder's first
            _problem("3x3", 16, 128, statistics=statistics),  # the encoder's first
            _problem("3x3 stride 2", 512, 512, statistics=statistics),
            _problem("upsample", 512, 512, statistics=statistics),
        ]
        for shortcut in SHORTCUTS:
            fused = {"norm": True, "shortcut": shortcut, "statistics": statistics}
            problems += [_problem("3x3", width, width, **fused) for width in (512, 256, 128)]
            if shortcut == "conv":  # the others have the same configs in place
                fused["in_place"] = True
                problems += [_problem("3x3", width, width, **fused) for width in (256, 128)]
    return [*problems, *(_problem("3x3", 128, out, norm=True) for out in (3, 8))]


def _split_problems() -> list[ConvProblem]:
    """What UNets of packed weights launch for small images, split over two work-groups."""
    return [
        _problem(kind, width, width, **fused)
        for kind, fused in (
            ("3x3", {"norm": True}),
            ("3x3", {"norm": True, "shortcut": "conv"}),
            (STRIDED[1], {}),
            ("upsample", {}),
        )
        for width in (1280, 640)
    ]


def shipped_specs(arch: Arch) -> list[KernelSpec]:
    """What is compiled ahead for a GPU, in fp16."""
    return _specs_of(arch, slice(1))


def searched_specs(arch: Arch) -> list[KernelSpec]:
    """Every config of the search space for the same launches."""
    return _specs_of(arch, slice(None))


def _specs_of(arch: Arch, which: slice) -> list[KernelSpec]:
    whole = [spec(p, config) for p in vae_problems() for config in configs(arch, p)[which]]
    split = [
        spec(p, replace(config, splits=2))
        for p in _split_problems()
        for config in configs(arch, p)[which]
    ]
    ends = (pack_spec("float16"), sum_spec("float16"))
    return [*dict.fromkeys(whole), ends[0], *dict.fromkeys(split), ends[1]]
