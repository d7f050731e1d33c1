"""Convolutions of small images: their channels are split over several work-groups.

Each of these writes its sums, in float32, and conv_sum.hip adds them and does the rest. When this
is worth a second launch, and how it is called.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import Launch
from lib_rocm_sd.ops.conv import kernel, layout, rows
from lib_rocm_sd.ops.conv.kernel import ConvConfig, ConvSumParams
from lib_rocm_sd.ops.conv.problem import DEEP, ConvProblem
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES
from lib_rocm_sd.ops.lazily import torch


def configs(arch: Arch, problem: ConvProblem) -> tuple[ConvConfig, ...]:
    """The search space: where there are few work-groups, configs that are split come first."""
    p = problem
    if p.in_rows:
        return rows.configs(arch, p)
    found = kernel.configs(arch, p)
    split: list[ConvConfig] = []
    for config in found:
        count = _splits(p, config, kernel.wanted_groups(arch))
        counts = (count, 2 * count, count // 2) if config is found[0] and count > 1 else (count,)
        split += [replace(config, splits=n) for n in counts if 1 < n <= _most(p)]
    return (*split, *found)


def workspace_bytes(problem: ConvProblem) -> int:
    """Most bytes that the partial sums take, on any card."""
    p = problem
    height, width = p.out_size
    if p.in_rows:
        count = rows.most_splits(p)
    else:
        count = _splits(p, ConvConfig(4, 4, 4, 2, 32, 256), max(kernel.GROUPS.values()))
    return 4 * count * p.batch * height * width * kernel.padded(p.out_channels) * (count > 1)


def _most(problem: ConvProblem) -> int:
    """Splits. No VAE has so many channels that there are any: bands must be split as the image.
    conv_sum.hip has no epilogue.
    """
    most = min(kernel.MOST_SPLITS, problem.in_channels // kernel.LEAST_CHANNELS)
    return most if problem.in_channels >= DEEP and problem.epilogue is None else 1


def _splits(problem: ConvProblem, config: ConvConfig, wanted: int) -> int:
    """Splits of `problem` with this config, for at most `wanted` work-groups; 1: none."""
    co = kernel.padded(problem.out_channels)
    tiling = kernel.tiling(problem.kind, *problem.out_size, co, config)
    groups = max(1, problem.batch * tiling.parts * tiling.blocks_co)
    return max(1, min(_most(problem), wanted // groups))


class Summed(NamedTuple):
    """What conv_sum reads and writes beside the sums; functional.conv says what most of it is."""

    bias: torch.Tensor
    bias_stride: int
    out: torch.Tensor
    shortcut: torch.Tensor | None = None
    overflow: torch.Tensor | None = None
    statistics: bool = False


def launch_sum(launch: Launch, sums: torch.Tensor, given: Summed) -> torch.Tensor | None:
    """Writes `given.out`, which may be the shortcut, from sums (N, splits, H, W, co) float32.

    Returns its statistics (N, parts, co, 4), of 16 pixels each, if they are wanted.

    out and the shortcut are rows of pixels (layout.pixel_stride).
    """
    out, shortcut = given.out, given.shortcut
    strides = [0 if t is None else layout.pixel_stride(t) or 0 for t in (shortcut, out)]
    params, grid = sum_arguments(tuple(sums.shape), out.shape[3], *strides)
    made = place_sum(params, sums, given)
    launch(kernel.sum_spec(DTYPE_NAMES[out.dtype]), grid, kernel.SUM_THREADS, params, out.device)
    return made


def sum_arguments(
    sums: tuple[int, ...], out_channels: int, shortcut_stride: int, out_stride: int
) -> tuple[ConvSumParams, int]:
    """conv_sum's argument for `sums` (N, splits, H, W, co), but for addresses and the bias' stride,
    and its work-groups.
    """
    batch, splits, height, width, co = sums
    pixels = height * width
    parts, blocks = -(-pixels // kernel.SUM_PIXELS), -(-co // kernel.SUM_CHANNELS)
    sizes = (splits, pixels, co, out_channels, parts, blocks, 0, shortcut_stride, out_stride)
    return ConvSumParams(*(0,) * 6, *sizes), batch * parts * blocks


def place_sum(params: ConvSumParams, sums: torch.Tensor, given: Summed) -> torch.Tensor | None:
    """Writes where all lies; the statistics that will be made, if they are wanted."""
    made, shortcut, overflow = None, given.shortcut, given.overflow
    if given.statistics:
        made = sums.new_empty((sums.shape[0], params.parts, params.co, 4))
    params.sums, params.bias, params.out = (t.data_ptr() for t in (sums, given.bias, given.out))
    params.shortcut = 0 if shortcut is None else shortcut.data_ptr()
    params.statistics = 0 if made is None else made.data_ptr()
    params.overflow = 0 if overflow is None else overflow.data_ptr()
    params.bias_stride = given.bias_stride
    return made
