"""Convolutions of VAE and UNet, channels-last, with GroupNorm + SiLU and what comes after fused.

x (N, H, W, Ci) contiguous, Ci a multiple of 16 (more than the weight has are ignored); the output
is (N, Ho, Wo, Co), Co padded with zeros to a multiple of 8. Kinds: "3x3" with padding 1;
"3x3 stride 2" with padding 0 before and 1 after, as in the encoder of Stable Diffusion's VAE;
"3x3 stride 2 padded" with padding 1 on all sides, as in its UNet; "upsample", nearest x2 and then
3x3. A 1x1 convolution is a linear layer over channels-last rows, and no kind of these.

Weights are packed once, as a VAE's are, or read as they lie (ConvWeights.in_rows), as a UNet's are,
of which a packed copy would be most of the UNet once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import Call, KernelSpec, Launch, Run, halves_only, reasons
from lib_rocm_sd.ops.bound import Bound, Prepare
from lib_rocm_sd.ops.conv import inputs as conv_inputs
from lib_rocm_sd.ops.conv import kernel, layout, rows, split
from lib_rocm_sd.ops.conv import problem as problems
from lib_rocm_sd.ops.conv.formula import given
from lib_rocm_sd.ops.conv.inputs import ConvInputs, Result
from lib_rocm_sd.ops.conv.kernel import (
    ConvConfig,
    ConvParams,
    ConvSumParams,
    ConvTiling,
    EpilogueParams,
)
from lib_rocm_sd.ops.conv.problem import Band, ConvProblem
from lib_rocm_sd.ops.conv.split import Summed, launch_sum, sum_arguments
from lib_rocm_sd.ops.conv.weights import PackedWeights, matrix_of
from lib_rocm_sd.ops.group_norm.kernel import GroupNormConfig, finalize_spec, merge_spec
from lib_rocm_sd.ops.group_norm.launch import launch_finalize, launch_merge
from lib_rocm_sd.ops.kernel_variant import KernelVariant
from lib_rocm_sd.ops.lazily import torch

# A convolution's launches: what follows from its problem and config alone, and its calls with
# weights as they lie, which differ only in where tensors lie.


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
    first: ConvParams | EpilogueParams


@lru_cache(maxsize=1024)
def work_of(problem: ConvProblem, config: ConvConfig, band: Band | None, strides: Strides) -> Work:
    """The work of one call."""
    p, shape = problem, problems.made_shape(problem, band)
    co = kernel.padded(p.out_channels)
    tiling = kernel.tiling("3x3" if p.in_rows else p.kind, *shape[1:3], co, config)
    beside: tuple[int, ...] | None = None
    if config.splits > 1:
        beside = (p.batch, config.splits, *shape[1:3], co)
    elif p.statistics:
        beside = (p.batch, tiling.parts, co, 4)
    first = (ConvParams if p.epilogue is None else EpilogueParams)(
        *(0,) * 9,
        *(p.height, p.width, p.in_channels, tiling.rows, tiling.columns, co),
        *(shape[3], p.shortcut_channels, *strides),
        *(tiling.tiles_x, tiling.tiles_y, tiling.blocks_co, *shape[1:3]),
        *(0 if band is None else band.above, p.kind == "3x3 stride 2 padded", 0, config.splits),
        p.out_channels,
    )
    grid = tiling.parts * tiling.blocks_co * p.batch * config.splits
    return Work(kernel.spec(p, config), grid, shape, tiling, beside, first)


def place(
    params: ConvParams | EpilogueParams,
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


class BoundConv(Bound[ConvParams | EpilogueParams]):
    """Callable like `Variant.run`, with weights as they lie, of whole images. What has no dense
    pixels from a multiple of 16 bytes on goes to `run`.
    """

    __slots__ = ("_run", "_sum", "_work")

    def __init__(self, work: Work, run: Run, prepare: Prepare, add: BoundSum | None) -> None:
        super().__init__(work.first, prepare)
        self._work, self._run, self._sum = work, run, add

    def __call__(self, call: Call[Any, ConvInputs]) -> Result:
        problem, inputs = call.problem, call.inputs
        x, weights, norm, shortcut, next_norm, overflow, _, _, _, embedding, *_ = inputs
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
            has_norm = next_norm is not None
            statistics = self._sum(beside, Summed(bias, stride, y, added, overflow, has_norm))
        if statistics is None:
            return y, None
        return y, finished(call.launcher, statistics, 1, inputs)


class BoundSum(Bound[ConvSumParams]):
    """The launch that adds what splits made."""

    def __call__(self, sums: torch.Tensor, given: Summed) -> torch.Tensor | None:
        """The statistics, if they are wanted."""
        packet = self.taken()
        statistics = split.place_sum(packet.params, sums, given)
        packet.launch()
        self.free.append(packet)
        return statistics


def finished(
    launch: Launch, statistics: torch.Tensor, phases: int, inputs: ConvInputs
) -> torch.Tensor | None:
    """The next norm, or of a band its statistics."""
    finish = inputs.finish or partial(launch_finalize, launch, MERGE)
    return given(statistics, phases, inputs.next_norm, inputs.band, finish)


def lies_densely(image: torch.Tensor) -> bool:
    """From a multiple of 16 bytes on."""
    return image.is_contiguous() and image.data_ptr() % ALIGNED_BYTES == 0


_BEHIND = 5
"""Less than LibraryConv's."""


class MatrixConv(KernelVariant[ConvProblem, ConvInputs]):
    """kernels/conv3x3.hip and upsample_conv.hip; for small images conv_sum.hip beside them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def kernel_refusals(self, arch: Arch, problem: ConvProblem) -> list[str]:
        p = problem
        height, width = p.out_size
        return (_rows_refusals(p) if p.in_rows else []) + reasons(
            halves_only(p.dtype),
            (
                p.shortcut != "none" and (p.out_channels % 16 or p.shortcut_channels % 16),
                f"a shortcut of {p.shortcut_channels} to {p.out_channels} channels: no whole tiles",
            ),
            (
                p.kind == "upsample" and (p.norm or p.shortcut != "none"),
                "upsampling has neither norm nor shortcut",
            ),
            (max(height, width) > 1 << 16, f"{height} x {width} is more than 65,536 a side"),
            (
                max(p.width * p.in_channels, width * p.out_channels) > layout.MOST_ROW_VALUES,
                f"a row of {p.width} x {p.in_channels} or {width} x {p.out_channels} values",
            ),
            (
                not p.in_rows and not kernel.configs(arch, p),
                f"no work-group makes all {p.out_channels} channels, as it must in place",
            ),
        )

    def preference_for(self, arch: Arch | None, problem: ConvProblem) -> int:
        """With weights as they lie, behind a library's on CDNA and NVIDIA: MIOpen and cuDNN are
        fast there with channels-last halves, which MIOpen is not on RDNA (docs/unet.md).
        """
        behind = problem.in_rows and arch is not None and arch.has_fast_libraries
        return _BEHIND if behind else self.preference

    def input_refusals(self, inputs: ConvInputs) -> list[str]:
        return conv_inputs.input_refusals(inputs)

    def workspace(self, problem: ConvProblem) -> int:
        """The sums of a small image, whose channels are split."""
        return split.workspace_bytes(problem)

    def configs(self, arch: Arch | None, problem: ConvProblem) -> Sequence[ConvConfig]:
        return split.configs(arch, problem) if arch else ()

    def tested_as(self, config: ConvConfig) -> ConvConfig:
        """Over how many work-groups channels are split is an argument."""
        return config if config.splits <= 2 else replace(config, splits=2)

    def specs(self, arch: Arch, problem: ConvProblem, config: ConvConfig) -> Sequence[KernelSpec]:
        merge = (merge_spec(MERGE), finalize_spec(MERGE)) if problem.statistics else ()
        added = (kernel.sum_spec(problem.dtype),) if config.splits > 1 else ()
        pack = () if problem.in_rows else (kernel.pack_spec(problem.dtype),)
        return (kernel.spec(problem, config), *pack, *added, *merge)

    def run(self, call: Call[ConvProblem, ConvInputs]) -> Result:
        launch, config, problem, inputs = call.launcher, call.config, call.problem, call.inputs
        x, weights, norm, shortcut, next_norm, overflow, band, out, _, embedding, *_ = inputs
        x, in_stride = _dense(x)
        shortcut, shortcut_stride = (None, 0) if shortcut is None else _dense(shortcut)
        second, second_stride = (None, 0) if inputs.second is None else _dense(inputs.second)
        if problem.in_rows:
            packed = _as_they_lie(inputs)
        else:
            packed = weights.packed(self.kind, x, shortcut, launch, config)
        bias, bias_stride = weights.bias_rows(packed.bias, embedding)
        y_stride = layout.pixel_stride(out) if out is not None else None
        made_channels = problems.output_shape(problem)[3]
        strides = Strides(in_stride, shortcut_stride, y_stride or made_channels)
        work = work_of(problem, config, band, strides)
        y = x.new_empty(work.made) if out is None else out
        beside = None
        if work.beside is not None:
            beside = x.new_empty(work.beside, dtype=torch.float32)
        params = type(work.first).from_buffer_copy(work.first)
        params.bias_stride = bias_stride
        through = packed.shortcut
        place(params, x, packed.weights, bias, norm, shortcut, through, y, beside, overflow)
        if isinstance(params, EpilogueParams) and inputs.epilogue is not None:
            slopes, how = weights.slopes_padded(x.device), inputs.epilogue
            params.slope, params.scale, params.second_scale = how.slope, how.scale, how.second_scale
            params.slopes = 0 if slopes is None else slopes.data_ptr()
            params.second = 0 if second is None else second.data_ptr()
            params.second_stride = second_stride
        launch(work.spec, work.grid, config.block, params, x.device)
        if beside is None:
            return y, None
        phases, statistics = work.tiling.phases, beside
        if config.splits > 1:
            added = shortcut if problem.shortcut == "identity" else None
            what = Summed(bias, bias_stride, y, added, overflow, next_norm is not None)
            summed = launch_sum(launch, beside, what)
            if summed is None:
                return y, None
            statistics, phases = summed, 1
        elif not problem.in_rows:  # bands of an image have the image's own parts
            tiles = work.tiling.tiles_x
            statistics = launch_merge(launch, MERGE, beside, packed.co, tiles)
        return y, finished(launch, statistics, phases, inputs)

    def bound(self, call: Call[ConvProblem, ConvInputs]) -> Run:
        """With weights as they lie, where the launcher can prepare a launch."""
        config, problem, inputs = call.config, call.problem, call.inputs
        prepare = getattr(call.launch, "prepare", None)
        whole = inputs.band is None and inputs.out is None
        if prepare is None or not problem.in_rows or not whole:
            return self.run
        p, made_channels = problem, problems.output_shape(problem)[3]
        strides = Strides(p.in_channels, p.shortcut_channels, made_channels)
        work, device, add = work_of(p, config, None, strides), inputs.x.device, None
        if config.splits > 1 and work.beside is not None:
            of_shortcut = p.shortcut_channels if p.shortcut == "identity" else 0
            first, grid = sum_arguments(work.beside, made_channels, of_shortcut, made_channels)
            spec = kernel.sum_spec(p.dtype)
            add = BoundSum(first, lambda a: prepare(spec, grid, kernel.SUM_THREADS, a, device))
        return BoundConv(
            work,
            self.run,
            lambda params: prepare(work.spec, work.grid, config.block, params, device),
            add,
        )


def _rows_refusals(p: ConvProblem) -> list[str]:
    """Refusals for weights that are read as they lie."""
    through = p.shortcut_channels if p.shortcut == "conv" else 0
    least = rows.LEAST_CHUNK
    weight_bytes = 2 * p.out_channels * max(9 * p.in_channels, through)
    return reasons(
        (p.epilogue is not None, "an activation or a scale after it"),
        (p.in_channels % least, f"{p.in_channels} input channels are no multiple of {least}"),
        (weight_bytes >= rows.MOST_WEIGHT_BYTES, f"a weight of {weight_bytes} bytes"),
        (p.shortcut == "conv" and p.kind != "3x3", f"{p.kind} with a 1x1 shortcut"),
        (p.in_place and p.shortcut == "conv", "a 1x1 shortcut over which the output is written"),
    )


def _as_they_lie(inputs: ConvInputs) -> PackedWeights:
    weights, through = inputs.weights, None
    if inputs.shortcut is not None and inputs.through is not None:
        through = matrix_of(inputs.through)
    co = kernel.padded(weights.weight.shape[0])
    return PackedWeights(weights.rows(inputs.x), weights.bias_padded(inputs.x.device), through, co)


def _dense(image: torch.Tensor) -> tuple[torch.Tensor, int]:
    """An image whose pixels are dense, a copy if need be, and its pixel stride."""
    step = layout.pixel_stride(image)
    if step is None:
        image = image.clone(memory_format=torch.contiguous_format)
        step = image.shape[3]
    return image, step
