"""How convolutions are cut whose weights are read as they lie: a UNet's. Needs no torch.

A weight (Co, Ci, 3, 3) in channels-last memory is a matrix (Co, 9 Ci); see common/conv_rows.h.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache

from lib_rocm_sd.arch import Arch, table
from lib_rocm_sd.ops.conv import kernel
from lib_rocm_sd.ops.conv.kernel import STRIDED, ConvConfig, ConvForm

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


@dataclass(frozen=True)
class Layer:
    """A call, as far as its configs hang on it: `height` and `width` are the output's.
    `shortcut_channels`: of what is multiplied by a 1x1 weight, else 0.
    """

    batch: int
    height: int
    width: int
    in_channels: int
    out_channels: int
    shortcut_channels: int = 0

    @property
    def chunk(self) -> int:
        """The most input channels that can be staged at a time."""
        both = (self.in_channels, self.shortcut_channels)
        return next((c for c in (64, 32, LEAST_CHUNK) if not any(n % c for n in both)), 0)


@lru_cache(maxsize=1024)
def configs(arch: Arch, form: ConvForm, layer: Layer) -> tuple[ConvConfig, ...]:
    """The search space: first what computes least beyond what is wanted. Where there are few
    work-groups, each config comes split first, then as it is.
    """
    if not layer.chunk:
        return ()
    sizes = _by_work(arch, form, layer)
    found: list[ConvConfig] = []
    for config in dict.fromkeys(sizes):
        count = _splits(layer, config, kernel.wanted_groups(arch))
        first = config is sizes[0] and count > 1
        counts = (count, 2 * count, count // 2, 1) if first else (count, 1)
        found += [replace(config, splits=n) for n in counts if 1 <= n <= _most(layer)]
    return tuple(dict.fromkeys(found))


def _by_work(arch: Arch, form: ConvForm, layer: Layer) -> list[ConvConfig]:
    """Unsplit, what computes least first; equals keep their order."""
    sizes = [_config(arch, size, layer.chunk) for size in _sizes(arch, form, layer)]
    return sorted(sizes, key=lambda config: _computed(config, layer))


def _sizes(arch: Arch, form: ConvForm, layer: Layer) -> tuple[_Size, ...]:
    strided = form.kind in STRIDED
    if layer.out_channels <= 16:
        return (_FEW_STRIDED if strided else _FEW,)
    no_dot = arch.matrix == "dot2" and form.dtype == "bfloat16"  # more instructions and registers
    return (_STRIDED if strided else _SIZES)["fma" if no_dot else arch.matrix]


def _config(arch: Arch, size: _Size, chunk: int) -> ConvConfig:
    waves_co, waves_pix, tiles_co, tiles_pix, most = size
    tiles = (waves_co, waves_pix, tiles_co, tiles_pix)
    return ConvConfig(*tiles, arch.wave_size, 0, chunk_c=min(most, chunk))


def _groups(config: ConvConfig, layer: Layer) -> int:
    cut = kernel.tiling("3x3", layer.height, layer.width, layer.out_channels, config)
    return max(1, layer.batch * cut.parts * cut.blocks_co)


def _computed(config: ConvConfig, layer: Layer) -> int:
    """Pixels times channels, those beyond the image and the weights among them."""
    return _groups(config, layer) * config.rows * config.block_co


def _most(layer: Layer) -> int:
    return max(1, min(kernel.MOST_SPLITS, layer.in_channels // kernel.LEAST_CHANNELS))


def _splits(layer: Layer, config: ConvConfig, wanted: int) -> int:
    """So that there are at most so many work-groups; 1: none."""
    return max(1, min(_most(layer), wanted // _groups(config, layer)))


@lru_cache(maxsize=1024)
def most_splits(layer: Layer) -> int:
    """Most splits of a config that runs unmeasured, on any card."""
    form, found = ConvForm(), 1
    for arch in _one_of_each() if layer.chunk else ():
        config = _by_work(arch, form, layer)[0]
        found = max(found, _splits(layer, config, kernel.wanted_groups(arch)))
    return found


@cache
def _one_of_each() -> tuple[Arch, ...]:
    """A GPU with each kind of matrix unit; graphics within a processor apart."""
    return tuple({arch.matrix: arch for arch in table().values() if not arch.integrated}.values())
