"""What kernels/group_norm_silu.hip is compiled with and called with; whole.py: small images.

Needs no torch, so that install.py can use it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import HALVES, KernelSpec
from lib_rocm_sd.ops.group_norm import whole

SOURCE = "group_norm_silu.hip"
DTYPES = HALVES
AFFINE_KINDS = ("none", "float16", "bfloat16", "float32")
"""Kinds of gamma and beta, in the order of AffineKind in group_norm_silu.hip."""

WANTED_GROUPS = 1024
"""Work-groups that keep a large card busy, where an image has enough to do for so many."""
LEAST_PIXELS = 128
"""Fewest pixels of a part in (N, pixels, C): its statistics take at most 1/16 of what it reads."""
LEAST_RUN = 8192
"""Pixels of a part in (N, C, pixels), where a part is one channel's."""
MOST_PIXELS = 1 << 16
"""Pixels of a part: counted exactly in float32, by far."""
COLUMNS = 64
"""Most columns, of eight channels each, of a work-group; on it depend the parts, so no config."""
DIRECT_ENTRIES = 8192
"""A group's statistics that one work-group merges; where there are more, parts are merged first."""


class ImageParams(ctypes.Structure):
    """The argument of group_norm_statistics, _apply and _finish; the same struct stands in
    group_norm_silu.hip.
    """

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("x", "out", "statistics", "norm")),
        *((name, ctypes.c_uint32) for name in ("channels", "pixels", "parts", "part_pixels")),
        *((name, ctypes.c_uint32) for name in ("width", "column_blocks", "units", "aligned")),
        ("groups", ctypes.c_uint32),
        ("bias_stride", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("bias", "shortcut", "overflow")),
        *((name, ctypes.c_uint32) for name in ("source_rows", "source_columns", "above")),
        ("columns", ctypes.c_uint32),
    ]


class MergeParams(ctypes.Structure):
    """The argument of group_norm_merge and group_norm_finalize; the same struct stands in
    group_norm_silu.hip.
    """

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("statistics", "out", "gamma", "beta")),
        *((name, ctypes.c_uint32) for name in ("parts", "statistics_channels", "channels")),
        *((name, ctypes.c_uint32) for name in ("group_channels", "out_parts", "part_parts")),
        *((name, ctypes.c_uint32) for name in ("width", "column_blocks")),
        *((name, ctypes.c_uint32) for name in ("gamma_kind", "beta_kind")),
        ("eps", ctypes.c_float),
    ]


@dataclass(frozen=True)
class GroupNormConfig:
    """Work-items of a work-group, and 16-byte reads that each keeps in flight."""

    threads: int
    unroll: int


@dataclass(frozen=True)
class NormForm:
    """What a pass over the image is compiled for. channels_last: (N, pixels, C)."""

    dtype: str
    channels_last: bool
    vector: int

    def defines(self) -> dict[str, int]:
        """As preprocessor definitions."""
        return {
            "BF16_HALVES": int(self.dtype == "bfloat16"),
            "CHANNELS_LAST": int(self.channels_last),
            "VECTOR": self.vector,
        }


@dataclass(frozen=True)
class NormTiling:
    """How a pass is cut into work-groups; the fields of ImageParams, and their number."""

    parts: int
    part_pixels: int
    width: int
    column_blocks: int
    units: int
    grid: int


def configs(arch: Arch) -> tuple[GroupNormConfig, ...]:
    """The search space, the safe default first. None of them spills registers."""
    return (GroupNormConfig(256, 4), GroupNormConfig(256, 8), GroupNormConfig(512, 4))


@lru_cache(maxsize=256)
def form_of(dtype: str, channels: int, channels_last: bool) -> NormForm:
    """The form for an image; halves that belong together must be a multiple of eight."""
    return NormForm(dtype, channels_last, 1 if channels_last and channels % 8 else 8)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _columns(channels: int, vector: int) -> tuple[int, int]:
    """Columns of a work-group, and work-groups per row of channels, in (N, pixels, C)."""
    vectors = _ceil(channels, vector)
    blocks = _ceil(vectors, COLUMNS)
    return _ceil(vectors, blocks), blocks


def part_pixels(batch: int, channels: int, pixels: int, form: NormForm) -> int:
    """Pixels of each part but the last, in statistics of an image that has some."""
    if form.channels_last:
        together, least = batch * _columns(channels, form.vector)[1], LEAST_PIXELS
    else:
        together, least = _ceil(batch * channels, 4), LEAST_RUN
    parts = min(_ceil(WANTED_GROUPS, together), max(1, pixels // least))
    return _ceil(pixels, max(parts, _ceil(pixels, MOST_PIXELS)))


def parts_of(batch: int, channels: int, pixels: int, form: NormForm) -> int:
    """Parts of the statistics of such an image; none of them is empty."""
    if 0 in (batch, channels, pixels):
        return 0
    return _ceil(pixels, part_pixels(batch, channels, pixels, form))


def merged_parts(parts: int, group_channels: int) -> int:
    """Parts to which statistics are merged first, by many work-groups; `parts` where they are not.

    One work-group finalizes a group of `group_channels`.
    """
    if parts * group_channels <= DIRECT_ENTRIES:
        return parts
    return max(1, DIRECT_ENTRIES // 4 // group_channels)


@lru_cache(maxsize=1024)
def finish_tiling(batch: int, channels: int, height: int, width: int) -> NormTiling:
    """The work-groups of group_norm_finish: a part of the statistics is a row of the image."""
    columns, blocks = _columns(channels, 8)
    return NormTiling(height, width, columns, blocks, 0, batch * height * blocks)


@lru_cache(maxsize=1024)
def tiling(
    batch: int,
    channels: int,
    pixels: int,
    form: NormForm,
    config: GroupNormConfig,
    statistics: bool,
) -> NormTiling:
    """The work-groups of the pass for statistics, or of the one that applies them."""
    if form.channels_last:
        width, blocks = _columns(channels, form.vector)
        reads = config.threads // width * config.unroll
        most = max(1, batch * blocks * _ceil(pixels, reads) // WANTED_GROUPS)
        each = reads * min(most, 4)
        if statistics:
            each = part_pixels(batch, channels, pixels, form)
        parts = _ceil(pixels, each)
        return NormTiling(parts, each, width, blocks, 0, batch * parts * blocks)
    each = part_pixels(batch, channels, pixels, form)
    lanes = 8
    while lanes < config.threads and lanes * config.unroll < each // form.vector:
        lanes *= 2
    parts = _ceil(pixels, each)
    units = batch * channels * parts
    return NormTiling(parts, each, lanes, 0, units, _ceil(units, config.threads // lanes))


@cache
def statistics_spec(form: NormForm, config: GroupNormConfig) -> KernelSpec:
    """x -> statistics."""
    return _spec("STATISTICS", config, **form.defines())


@cache
def apply_spec(form: NormForm, silu: bool, config: GroupNormConfig) -> KernelSpec:
    """x, norm -> out."""
    return _spec("APPLY", config, **form.defines(), SILU=int(silu))


@cache
def finish_spec(
    dtype: str, shortcut: bool, statistics: bool, phases: bool, config: GroupNormConfig
) -> KernelSpec:
    """x, bias, shortcut -> out, statistics; channels-last, channels in eights."""
    form = NormForm(dtype, True, 8).defines()
    fused = {"SHORTCUT": int(shortcut), "STATISTICS": int(statistics), "PHASES": int(phases)}
    return _spec("FINISH", config, **form, **fused)


@cache
def merge_spec(config: GroupNormConfig) -> KernelSpec:
    """Statistics -> statistics of fewer parts."""
    return _spec("MERGE", config)


@cache
def finalize_spec(config: GroupNormConfig) -> KernelSpec:
    """Statistics, gamma, beta -> norm."""
    return _spec("FINALIZE", config)


def _spec(step: str, config: GroupNormConfig, **form: int) -> KernelSpec:
    defines = {f"STEP_{step}": 1, **form, "THREADS": config.threads, "UNROLL": config.unroll}
    return KernelSpec(SOURCE, f"group_norm_{step.lower()}", tuple(defines.items()))


def specs(form: NormForm, silu: bool, config: GroupNormConfig) -> list[KernelSpec]:
    """All that a GroupNorm launches."""
    return [
        statistics_spec(form, config),
        merge_spec(config),
        finalize_spec(config),
        apply_spec(form, silu, config),
    ]


def _usual_specs(arch: Arch, dtypes: tuple[str, ...], config: GroupNormConfig) -> list[KernelSpec]:
    found = [
        spec
        for dtype in dtypes
        for channels_last in (True, False)
        for silu in (True, False)
        for spec in specs(NormForm(dtype, channels_last, 8), silu, config)
    ]
    return list(dict.fromkeys(found))


def shipped_specs(arch: Arch) -> list[KernelSpec]:
    """What is compiled ahead for a GPU: both half types and layouts, channels in eights."""
    return _usual_specs(arch, DTYPES, configs(arch)[0]) + whole.specs(arch, DTYPES)


def searched_specs(arch: Arch) -> list[KernelSpec]:
    """Every config of the search space, float16."""
    steps = [spec for config in configs(arch) for spec in _usual_specs(arch, DTYPES[:1], config)]
    return steps + whole.specs(arch, DTYPES[:1])
