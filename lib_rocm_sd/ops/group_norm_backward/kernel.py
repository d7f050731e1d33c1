"""What kernels/group_norm_backward.hip is compiled with and called with.

Needs no torch. Only training needs these kernels: nothing compiles them before they are called.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.group_norm import kernel as forward
from lib_rocm_sd.ops.group_norm import whole
from lib_rocm_sd.ops.group_norm.kernel import (
    AFFINE_KINDS,
    DTYPES,
    GroupNormConfig,
    NormForm,
    NormTiling,
)
from lib_rocm_sd.ops.group_norm.whole import WholeConfig
from lib_rocm_sd.ops.layer_norm_backward import gradients

SOURCE = "group_norm_backward.hip"
VECTOR = 8
LARGEST_WIDTH = 64
"""Channels of a group that are added up at a time."""


class GroupNormBackwardParams(ctypes.Structure):
    """The argument of group_norm_backward_sums and _apply; the same struct stands in
    group_norm_backward.hip.
    """

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("grad", "x", "out", "norm", "factors", "sums")),
        *((name, ctypes.c_uint64) for name in ("gamma", "beta")),
        *((name, ctypes.c_uint32) for name in ("channels", "pixels", "parts", "part_pixels")),
        *((name, ctypes.c_uint32) for name in ("width", "column_blocks", "units", "aligned")),
    ]


class GroupNormCombineParams(ctypes.Structure):
    """The argument of group_norm_backward_combine; the same struct stands in
    group_norm_backward.hip.
    """

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("sums", "norm", "gamma", "beta", "totals")),
        ("factors", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("parts", "channels", "group_channels", "width")),
        ("kind", ctypes.c_uint32),
        ("share", ctypes.c_float),
    ]


@dataclass(frozen=True)
class BackwardConfig:
    """Work-items of a work-group and reads in flight, as of the forward pass; and of its kernel
    for small images, which then makes the norm: else 0.
    """

    threads: int
    unroll: int
    whole_threads: int = 0
    whole_held: int = 0

    @property
    def steps(self) -> GroupNormConfig:
        """Config of the passes over an image."""
        return GroupNormConfig(self.threads, self.unroll)

    @property
    def whole(self) -> WholeConfig | None:
        """Config of the norm in a single launch; None where it takes several."""
        return WholeConfig(self.whole_threads, self.whole_held) if self.whole_threads else None


def configs(
    arch: Arch, channels: int, pixels: int, groups: int, form: NormForm
) -> tuple[BackwardConfig, ...]:
    """One: what the forward pass runs unmeasured."""
    steps = forward.configs(arch)[0]
    found: tuple[WholeConfig, ...] = ()
    if form.channels_last:
        found = whole.configs(arch, channels, pixels, groups, form.vector)
    held = [number for config in found for number in (config.threads, config.held)]
    return (BackwardConfig(steps.threads, steps.unroll, *held),)


@lru_cache(maxsize=1024)
def tiling(
    batch: int, channels: int, pixels: int, form: NormForm, config: GroupNormConfig, sums: bool
) -> NormTiling:
    """The work-groups of the pass for sums, or of the one that applies them. In (N, C, pixels) each
    part begins at a multiple of eight pixels.
    """
    found = forward.tiling(batch, channels, pixels, form, config, sums)
    if form.channels_last:
        return found
    each = -(-found.part_pixels // VECTOR) * VECTOR
    parts = -(-pixels // each)
    units = batch * channels * parts
    grid = -(-units // (config.threads // found.width))
    return NormTiling(parts, each, found.width, 0, units, grid)


def combined_width(parts: int, group_channels: int) -> int:
    """Channels that a work-group of the middle step adds up at a time; few where there are many
    parts.
    """
    return min(group_channels, LARGEST_WIDTH if parts <= 64 else LARGEST_WIDTH // 4)


def _spec(step: str, config: GroupNormConfig, **form: int) -> KernelSpec:
    defines = {f"STEP_{step}": 1, **form, "THREADS": config.threads, "UNROLL": config.unroll}
    return KernelSpec(SOURCE, f"group_norm_backward_{step.lower()}", tuple(defines.items()))


@cache
def sums_spec(form: NormForm, silu: bool, affine: str, config: GroupNormConfig) -> KernelSpec:
    """x, grad, norm -> sums. `affine`: of AFFINE_KINDS; without SiLU gamma is not read."""
    kind = AFFINE_KINDS.index(affine if silu else "none")
    return _spec("SUMS", config, **form.defines(), SILU=int(silu), AFFINE=kind)


@cache
def combine_spec(config: GroupNormConfig) -> KernelSpec:
    """sums, norm -> totals, factors."""
    return _spec("COMBINE", config)


@cache
def apply_spec(form: NormForm, silu: bool, config: GroupNormConfig) -> KernelSpec:
    """x, grad, factors -> out."""
    return _spec("APPLY", config, **form.defines(), SILU=int(silu))


def own_specs(form: NormForm, silu: bool, affine: str, config: GroupNormConfig) -> list[KernelSpec]:
    """All of this file and of the last step; the norm is made by the forward pass's kernels."""
    return [
        sums_spec(form, silu, affine, config),
        combine_spec(config),
        apply_spec(form, silu, config),
        gradients.spec(),
    ]


def norm_specs(form: NormForm, config: BackwardConfig) -> list[KernelSpec]:
    """The forward pass's, by which the norm of the image is made."""
    if config.whole is not None:
        return [whole.spec(form.dtype, form.vector, False, config.whole)]
    return forward.specs(form, False, config.steps)[:-1]


def _usual(arch: Arch, dtypes: tuple[str, ...]) -> list[KernelSpec]:
    config = forward.configs(arch)[0]
    found = [
        spec
        for dtype in dtypes
        for channels_last in (True, False)
        for silu in (True, False)
        for spec in own_specs(NormForm(dtype, channels_last, VECTOR), silu, dtype, config)
    ]
    return list(dict.fromkeys(found))


def shipped_specs(arch: Arch) -> list[KernelSpec]:
    """What `compile` makes for a GPU when it is asked; no install does."""
    return _usual(arch, DTYPES)


def searched_specs(arch: Arch) -> list[KernelSpec]:
    """The same, float16: there is one config."""
    return _usual(arch, DTYPES[:1])
