"""A convolution's launches: what follows from its problem and config alone, and its calls with
weights as they lie, which differ only in where tensors lie.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

from lib_rocm_sd.ops.base import Call, KernelSpec, Launch, Run
from lib_rocm_sd.ops.bound import Bound, Prepare
from lib_rocm_sd.ops.conv import kernel, split
from lib_rocm_sd.ops.conv import problem as problems
from lib_rocm_sd.ops.conv.formula import given
from lib_rocm_sd.ops.conv.inputs import ConvInputs, Result
from lib_rocm_sd.ops.conv.kernel import ConvConfig, ConvParams, ConvSumParams, ConvTiling
from lib_rocm_sd.ops.conv.problem import Band, ConvProblem
from lib_rocm_sd.ops.conv.split import Summed
from lib_rocm_sd.ops.conv.weights import matrix_of
from lib_rocm_sd.ops.group_norm.kernel import GroupNormConfig
from lib_rocm_sd.ops.group_norm.launch import launch_finalize
from lib_rocm_sd.ops.lazily import torch

Shape = tuple[int, int, int, int]
ALIGNED_BYTES = 16
MERGE = GroupNormConfig(256, 4)
"""By which statistics are merged."""


class Strides(NamedTuple):
    """Values from one pixel to the next."""

    x: int
    shortcut: int
    out: int


class Work(NamedTuple):
    """`made`: the output's shape. `beside`: of what is made beside it, its statistics (N, parts,
    co, 4), or before it, where channels are split: sums (N, splits, H, W, co). `first`: the
    kernel's argument, but for addresses and the bias' stride.
    """

    spec: KernelSpec
    grid: int
    made: Shape
    tiling: ConvTiling
    beside: tuple[int, ...] | None
    first: ConvParams


@lru_cache(maxsize=1024)
def work_of(problem: ConvProblem, config: ConvConfig, band: Band | None, strides: Strides) -> Work:
    """The work of one call."""
    p, made = problem, problems.made_shape(problem, band)
    co = kernel.padded(p.out_channels)
    tiling = kernel.tiling("3x3" if p.in_rows else p.kind, *made[1:3], co, config)
    beside: tuple[int, ...] | None = None
    if config.splits > 1:
        beside = (p.batch, config.splits, *made[1:3], co)
    elif p.statistics:
        beside = (p.batch, tiling.parts, co, 4)
    first = ConvParams(
        *(0,) * 9,
        *(p.height, p.width, p.in_channels, tiling.rows, tiling.columns, co),
        *(made[3], p.shortcut_channels, *strides),
        *(tiling.tiles_x, tiling.tiles_y, tiling.blocks_co, *made[1:3]),
        *(0 if band is None else band.above, p.kind == "3x3 stride 2 padded", 0, config.splits),
        p.out_channels,
    )
    grid = tiling.parts * tiling.blocks_co * p.batch * config.splits
    return Work(kernel.spec(p, config), grid, made, tiling, beside, first)


def place(
    params: ConvParams,
    x: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor,
    norm: torch.Tensor | None,
    shortcut: torch.Tensor | None,
    through: torch.Tensor | None,
    y: torch.Tensor,
    beside: torch.Tensor | None,
    overflow: torch.Tensor | None,
) -> None:
    """Writes where these lie."""
    params.in_, params.weights, params.bias = x.data_ptr(), weights.data_ptr(), bias.data_ptr()
    params.norm = 0 if norm is None else norm.data_ptr()
    params.shortcut = 0 if shortcut is None else shortcut.data_ptr()
    params.shortcut_weights = 0 if through is None else through.data_ptr()
    params.out = y.data_ptr()
    params.statistics = 0 if beside is None else beside.data_ptr()
    params.overflow = 0 if overflow is None else overflow.data_ptr()


class BoundConv(Bound[ConvParams]):
    """Callable like `Variant.run`, with weights as they lie, of whole images. What has no dense
    pixels from a multiple of 16 bytes on goes to `run`.
    """

    __slots__ = ("_run", "_sum", "_work")

    def __init__(self, work: Work, run: Run, prepare: Prepare, add: BoundSum | None) -> None:
        super().__init__(work.first, prepare)
        self._work, self._run, self._sum = work, run, add

    def __call__(self, call: Call[Any, ConvInputs]) -> Result:
        problem, inputs = call.problem, call.inputs
        x, weights, norm, shortcut, next_norm, overflow, _, _, _, embedding, _ = inputs
        if not (lies_densely(x) and (shortcut is None or lies_densely(shortcut))):
            return self._run(call)  # type: ignore[no-any-return]
        work = self._work
        through = inputs.through if problem.shortcut == "conv" else None
        through = None if through is None else matrix_of(through)
        bias, stride = weights.bias_rows(weights.bias_padded(x.device), embedding)
        y = x.new_empty(work.made)
        beside = None
        if work.beside is not None:
            beside = x.new_empty(work.beside, dtype=torch.float32)
        packet = self.taken()
        packet.params.bias_stride = stride
        matrix = weights.rows(x)
        place(packet.params, x, matrix, bias, norm, shortcut, through, y, beside, overflow)
        packet.launch()
        self.free.append(packet)
        statistics = beside
        if self._sum is not None and beside is not None:
            added = shortcut if problem.shortcut == "identity" else None
            wanted = next_norm is not None
            statistics = self._sum(beside, Summed(bias, stride, y, added, overflow, wanted))
        if statistics is None:
            return y, None
        return y, finished(call.launcher, statistics, 1, inputs)


class BoundSum(Bound[ConvSumParams]):
    """The launch that adds what splits made."""

    def __call__(self, sums: torch.Tensor, given: Summed) -> torch.Tensor | None:
        """The statistics, if they are wanted."""
        packet = self.taken()
        made = split.place_sum(packet.params, sums, given)
        packet.launch()
        self.free.append(packet)
        return made


def finished(
    launch: Launch, statistics: torch.Tensor, phases: int, inputs: ConvInputs
) -> torch.Tensor | None:
    """The next norm, or of a band its statistics."""
    finish = inputs.finish or partial(launch_finalize, launch, MERGE)
    return given(statistics, phases, inputs.next_norm, inputs.band, finish)


def lies_densely(image: torch.Tensor) -> bool:
    """From a multiple of 16 bytes on."""
    return image.is_contiguous() and image.data_ptr() % ALIGNED_BYTES == 0
