"""The launches of kernels/group_norm_silu.hip on torch tensors.

Images are (N, C, H, W) here, in either memory format; group_norm.py says what else there is.
"""

from __future__ import annotations

import torch

from lib_rocm_sd.ops.base import Launch
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES
from lib_rocm_sd.ops.group_norm import kernel
from lib_rocm_sd.ops.group_norm.formula import channels_of, dense
from lib_rocm_sd.ops.group_norm.kernel import GroupNormConfig, ImageParams, MergeParams


def launch_statistics(launch: Launch, config: GroupNormConfig, x: torch.Tensor) -> torch.Tensor:
    """The statistics of x (N, C, H, W) by group_norm_statistics."""
    x, channels_last = dense(x)
    batch, channels, pixels = x.shape[0], x.shape[1], x.shape[2] * x.shape[3]
    form = kernel.form_of(DTYPE_NAMES[x.dtype], channels, channels_last)
    tiling = kernel.tiling(batch, channels, pixels, form, config, statistics=True)
    out = x.new_empty((batch, tiling.parts, channels, 4), dtype=torch.float32)
    params = _image_params(x, channels, pixels, tiling)
    params.statistics = out.data_ptr()
    params.aligned = x.data_ptr() % 16 == 0
    spec = kernel.statistics_spec(form, config)
    launch(spec, tiling.grid, config.threads, params, x.device)
    return out


def launch_apply(
    launch: Launch, config: GroupNormConfig, x: torch.Tensor, norm: torch.Tensor, silu: bool
) -> torch.Tensor:
    """`norm` applied to x (N, C, H, W) by group_norm_apply."""
    x, channels_last = dense(x)
    norm = _aligned(norm.float())
    batch, channels, pixels = x.shape[0], x.shape[1], x.shape[2] * x.shape[3]
    form = kernel.form_of(DTYPE_NAMES[x.dtype], channels, channels_last)
    tiling = kernel.tiling(batch, channels, pixels, form, config, statistics=False)
    out = torch.empty_like(x)
    params = _image_params(x, channels, pixels, tiling)
    params.out, params.norm = out.data_ptr(), norm.data_ptr()
    params.aligned = (x.data_ptr() | out.data_ptr()) % 16 == 0
    launch(kernel.apply_spec(form, silu, config), tiling.grid, config.threads, params, x.device)
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
    params = _image_params(x, channels, height * width, tiling)
    params.out, params.bias = out.data_ptr(), bias.data_ptr()
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


def _image_params(
    x: torch.Tensor, channels: int, pixels: int, tiling: kernel.NormTiling
) -> ImageParams:
    return ImageParams(
        *(x.data_ptr(), 0, 0, 0),
        *(channels, pixels, tiling.parts, tiling.part_pixels),
        *(tiling.width, tiling.column_blocks, tiling.units, 0, tiling.grid),
    )


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
    statistics = _aligned(statistics)
    gamma, beta = (None if t is None else _aligned(t) for t in (gamma, beta))
    batch, parts, stride, _ = statistics.shape
    channels = channels_of(statistics, gamma, beta)
    fewer = kernel.merged_parts(parts, channels // groups)
    if fewer < parts:
        statistics = launch_merge(launch, config, statistics, channels, -(-parts // fewer))
        parts, stride = statistics.shape[1:3]
    norm = statistics.new_empty((batch, channels, 2))
    params = MergeParams(
        *(statistics.data_ptr(), norm.data_ptr(), _pointer(gamma), _pointer(beta)),
        *(parts, stride, channels, channels // groups, 0, 0, 0, 0),
        *(_kind(gamma), _kind(beta), eps),
    )
    spec = kernel.finalize_spec(config)
    launch(spec, batch * groups, config.threads, params, statistics.device)
    return norm


def launch_merge(
    launch: Launch, config: GroupNormConfig, statistics: torch.Tensor, channels: int, each: int
) -> torch.Tensor:
    """Statistics (N, parts, >= channels, 4), each run of `each` parts merged into one."""
    batch, parts, stride, _ = statistics.shape
    fewer = -(-parts // each)
    blocks = -(-channels // config.threads)
    out = statistics.new_empty((batch, fewer, channels, 4))
    params = MergeParams(
        *(statistics.data_ptr(), out.data_ptr(), 0, 0),
        *(parts, stride, channels, 0, fewer, each, -(-channels // blocks), blocks),
    )
    grid = batch * fewer * blocks
    launch(kernel.merge_spec(config), grid, config.threads, params, statistics.device)
    return out


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` without gaps, from a multiple of 16 bytes on; a copy if need be."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _pointer(values: torch.Tensor | None) -> int:
    return 0 if values is None else values.data_ptr()


def _kind(values: torch.Tensor | None) -> int:
    return kernel.AFFINE_KINDS.index("none" if values is None else DTYPE_NAMES[values.dtype])
