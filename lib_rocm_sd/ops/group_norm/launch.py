"""The launches of kernels/group_norm_silu.hip and group_norm_whole.hip on torch tensors.

Images are (N, C, H, W) here, in either memory format; group_norm.py says what else there is.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Generic, TypeVar

from lib_rocm_sd.ops.base import KernelSpec, Launch
from lib_rocm_sd.ops.bound import Bound, Launches
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES
from lib_rocm_sd.ops.group_norm import kernel, whole
from lib_rocm_sd.ops.group_norm.formula import channels_of, dense
from lib_rocm_sd.ops.group_norm.kernel import GroupNormConfig, ImageParams, MergeParams
from lib_rocm_sd.ops.group_norm.whole import WholeConfig, WholeParams
from lib_rocm_sd.ops.lazily import torch

P = TypeVar("P", bound=ctypes.Structure)


@dataclass(frozen=True)
class Step(Generic[P]):
    """One launch of a kernel, but for the addresses in `params`."""

    spec: KernelSpec
    grid: int
    threads: int
    params: P
    device: torch.device

    def launched(self, launch: Launch) -> None:
        """Now, with what is in `params`."""
        launch(self.spec, self.grid, self.threads, self.params, self.device)

    def bound(self, prepare: Launches) -> Bound[P]:
        """To be launched again and again; `prepare` is a launcher's."""
        spec, sizes, device = self.spec, (self.grid, self.threads), self.device
        return Bound(self.params, lambda params: prepare(spec, *sizes, params, device))


def statistics_step(
    config: GroupNormConfig, x: torch.Tensor, channels_last: bool
) -> Step[ImageParams]:
    """The statistics of a dense x (N, C, H, W)."""
    sizes, form = _sizes(x, channels_last)
    tiling = kernel.tiling(*sizes, form, config, statistics=True)
    params = _image_params(*sizes[1:], tiling)
    spec = kernel.statistics_spec(form, config)
    return Step(spec, tiling.grid, config.threads, params, x.device)


def launch_statistics(launch: Launch, config: GroupNormConfig, x: torch.Tensor) -> torch.Tensor:
    """The statistics of x (N, C, H, W) by group_norm_statistics."""
    x, channels_last = dense(x)
    step = statistics_step(config, x, channels_last)
    shape = (x.shape[0], step.params.parts, x.shape[1], 4)
    out = x.new_empty(shape, dtype=torch.float32)
    step.params.x, step.params.statistics = x.data_ptr(), out.data_ptr()
    step.params.aligned = x.data_ptr() % 16 == 0
    step.launched(launch)
    return out


def apply_step(
    config: GroupNormConfig, x: torch.Tensor, channels_last: bool, silu: bool
) -> Step[ImageParams]:
    """A norm applied to a dense x (N, C, H, W)."""
    sizes, form = _sizes(x, channels_last)
    tiling = kernel.tiling(*sizes, form, config, statistics=False)
    params = _image_params(*sizes[1:], tiling)
    spec = kernel.apply_spec(form, silu, config)
    return Step(spec, tiling.grid, config.threads, params, x.device)


def launch_apply(
    launch: Launch, config: GroupNormConfig, x: torch.Tensor, norm: torch.Tensor, silu: bool
) -> torch.Tensor:
    """`norm` applied to x (N, C, H, W) by group_norm_apply."""
    x, channels_last = dense(x)
    norm = aligned(norm.float())
    step = apply_step(config, x, channels_last, silu)
    out = torch.empty_like(x)
    step.params.x, step.params.out, step.params.norm = (t.data_ptr() for t in (x, out, norm))
    step.params.aligned = (x.data_ptr() | out.data_ptr()) % 16 == 0
    step.launched(launch)
    return out


def launch_finish(
    launch: Launch,
    config: GroupNormConfig,
    x: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor,
    shortcut: torch.Tensor | None = None,
    overflow: torch.Tensor | None = None,
    statistics: bool = False,
    above: int = 0,
) -> torch.Tensor | None:
    """out (N, H, W, C), C a multiple of 8, becomes x plus bias plus shortcut.

    bias (C) or (N, C) float32, its last stride 1.

    x is like out, and may be out, or (N, >= H / 2 + 1 + above, W / 2 + 1, 4 C): the phases of an
    upsampled image. All are contiguous. Returns the statistics (N, H, C, 4), a part per row, if
    wanted.
    """
    batch, height, width, channels = out.shape
    phases = x.shape[3] == 4 * channels
    tiling = kernel.finish_tiling(batch, channels, height, width)
    params = _image_params(channels, height * width, tiling)
    params.x, params.out, params.bias = x.data_ptr(), out.data_ptr(), bias.data_ptr()
    params.bias_stride = bias.stride(0) if bias.ndim == 2 else 0
    params.shortcut = 0 if shortcut is None else shortcut.data_ptr()
    params.overflow = 0 if overflow is None else overflow.data_ptr()
    params.aligned = (params.x | params.out | params.shortcut) % 16 == 0
    params.source_rows, params.source_columns = x.shape[1:3]
    params.above, params.columns = above, width
    made = None
    if statistics:
        made = out.new_empty((batch, tiling.parts, channels, 4), dtype=torch.float32)
        params.statistics = made.data_ptr()
    with_shortcut = shortcut is not None
    spec = kernel.finish_spec(DTYPE_NAMES[out.dtype], with_shortcut, statistics, phases, config)
    launch(spec, tiling.grid, config.threads, params, out.device)
    return made


def _sizes(x: torch.Tensor, channels_last: bool) -> tuple[tuple[int, int, int], kernel.NormForm]:
    batch, channels, height, width = x.shape
    form = kernel.form_of(DTYPE_NAMES[x.dtype], channels, channels_last)
    return (batch, channels, height * width), form


def _image_params(channels: int, pixels: int, tiling: kernel.NormTiling) -> ImageParams:
    return ImageParams(
        *(0, 0, 0, 0, channels, pixels, tiling.parts, tiling.part_pixels),
        *(tiling.width, tiling.column_blocks, tiling.units, 0, tiling.grid),
    )


def finalize_step(
    config: GroupNormConfig,
    shape: tuple[int, int, int],
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    channels: int,
    groups: int,
    device: torch.device,
) -> Step[MergeParams]:
    """The norm of statistics. shape: their images, parts and channels; gamma and beta dense."""
    batch, parts, stride = shape
    params = MergeParams(
        *(0, 0, 0, 0, parts, stride, channels, channels // groups, 0, 0, 0, 0),
        *(_kind(gamma), _kind(beta)),
    )
    return Step(kernel.finalize_spec(config), batch * groups, config.threads, params, device)


def launch_finalize(
    launch: Launch,
    config: GroupNormConfig,
    statistics: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    groups: int,
    eps: float,
) -> torch.Tensor:
    """The norm by group_norm_finalize, after group_norm_merge where there are many parts."""
    statistics = aligned(statistics)
    gamma, beta = (None if t is None else t.contiguous() for t in (gamma, beta))
    channels = channels_of(statistics, gamma, beta)
    fewer = kernel.merged_parts(statistics.shape[1], channels // groups)
    if fewer < statistics.shape[1]:
        each = -(-statistics.shape[1] // fewer)
        statistics = launch_merge(launch, config, statistics, channels, each)
    batch, parts, stride, _ = statistics.shape
    norm = statistics.new_empty((batch, channels, 2))
    step = finalize_step(config, (batch, parts, stride), gamma, beta, channels, groups, norm.device)
    params = step.params
    params.statistics, params.out, params.eps = statistics.data_ptr(), norm.data_ptr(), eps
    params.gamma, params.beta = pointer(gamma), pointer(beta)
    step.launched(launch)
    return norm


def merge_step(
    config: GroupNormConfig,
    shape: tuple[int, int, int],
    channels: int,
    each: int,
    device: torch.device,
) -> Step[MergeParams]:
    """Statistics of so many images, parts and channels, each run of `each` parts made one."""
    batch, parts, stride = shape
    fewer, blocks = -(-parts // each), -(-channels // config.threads)
    width = -(-channels // blocks)
    params = MergeParams(
        *(0, 0, 0, 0, parts, stride, channels, 0, fewer, each, width, blocks),
    )
    grid = batch * fewer * blocks
    return Step(kernel.merge_spec(config), grid, config.threads, params, device)


def launch_merge(
    launch: Launch, config: GroupNormConfig, statistics: torch.Tensor, channels: int, each: int
) -> torch.Tensor:
    """Statistics (N, parts, >= channels, 4), each run of `each` parts merged into one."""
    batch, parts, stride, _ = statistics.shape
    step = merge_step(config, (batch, parts, stride), channels, each, statistics.device)
    out = statistics.new_empty((batch, step.params.out_parts, channels, 4))
    step.params.statistics, step.params.out = statistics.data_ptr(), out.data_ptr()
    step.launched(launch)
    return out


def whole_step(
    config: WholeConfig,
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    groups: int,
    silu: bool,
) -> Step[WholeParams]:
    """All of a GroupNorm of a small, channels-last x (N, C, H, W); gamma and beta dense. What is
    added has no stride yet.
    """
    (batch, channels, pixels), form = _sizes(x, True)
    tiling = whole.tiling(channels, groups, form.vector)
    if pixels > config.pixels(tiling.width):
        raise ValueError(f"{config} does not hold {pixels} pixels of {channels} channels")
    params = WholeParams(
        *(0, 0, 0, 0, 0, 0, channels, pixels, channels // groups),
        *(tiling.run, tiling.width, tiling.blocks, _kind(gamma), _kind(beta)),
    )
    spec = whole.spec(form.dtype, form.vector, silu, config)
    return Step(spec, batch * tiling.blocks, config.threads, params, x.device)


def launch_whole(
    launch: Launch,
    config: WholeConfig,
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    groups: int,
    eps: float,
    silu: bool | None,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """GroupNorm of x (N, C, H, W), or of that plus `added` (N, C) in each pixel, by
    group_norm_whole. silu None: its norm (N, C, 2).
    """
    x, channels_last = dense(x)
    if not channels_last:
        raise ValueError(f"{config} takes channels-last images alone")
    x = x if x.data_ptr() % 16 == 0 else x.clone()
    gamma, beta = (None if t is None else t.contiguous() for t in (gamma, beta))
    step = whole_step(config, x, gamma, beta, groups, bool(silu))
    params = step.params
    params.x, params.gamma, params.beta = x.data_ptr(), pointer(gamma), pointer(beta)
    params.eps = eps
    if added is not None:
        added = added if lies_in_rows(added) else added.contiguous()
        params.added, params.added_stride = added.data_ptr(), added.stride(0)
    if silu is None:
        made = x.new_empty((*x.shape[:2], 2), dtype=torch.float32)
        params.norm = made.data_ptr()
    else:
        made = torch.empty_like(x)
        params.out = made.data_ptr()
    step.launched(launch)
    return made


def lies_in_rows(added: torch.Tensor) -> bool:
    """Whether the kernel reads (N, C) as it lies."""
    return added.stride(1) == 1 and added.stride(0) < 1 << 32


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` without gaps, from a multiple of 16 bytes on; a copy if need be."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def pointer(values: torch.Tensor | None) -> int:
    """Where they lie; 0 for none."""
    return 0 if values is None else values.data_ptr()


def _kind(values: torch.Tensor | None) -> int:
    return kernel.AFFINE_KINDS.index("none" if values is None else DTYPE_NAMES[values.dtype])
