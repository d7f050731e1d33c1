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

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import Call, KernelSpec, Run, Variant, halves_only, reasons
from lib_rocm_sd.ops.conv import inputs as conv_inputs
from lib_rocm_sd.ops.conv import kernel, layout, rows, split
from lib_rocm_sd.ops.conv import problem as problems
from lib_rocm_sd.ops.conv.call import (
    MERGE,
    BoundConv,
    BoundSum,
    Strides,
    finished,
    place,
    work_of,
)
from lib_rocm_sd.ops.conv.inputs import ConvInputs, Result
from lib_rocm_sd.ops.conv.kernel import ConvConfig, ConvParams
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.conv.split import Summed, launch_sum, sum_arguments
from lib_rocm_sd.ops.conv.weights import PackedWeights, matrix_of
from lib_rocm_sd.ops.group_norm.kernel import finalize_spec, merge_spec
from lib_rocm_sd.ops.group_norm.launch import launch_merge
from lib_rocm_sd.ops.lazily import torch

_BEHIND = 5
"""Less than LibraryConv's."""


class MatrixConv(Variant[ConvProblem, ConvInputs]):
    """kernels/conv3x3.hip and upsample_conv.hip; for small images conv_sum.hip beside them."""

    name = "rocm_sd"
    ours = True
    preference = 20

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def refusals(self, arch: Arch | None, problem: ConvProblem) -> list[str]:
        if arch is None:
            return ["no supported GPU"]
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
        x, weights, norm, shortcut, next_norm, overflow, band, out, _, embedding, _ = inputs
        x, in_stride = _dense(x)
        shortcut, shortcut_stride = (None, 0) if shortcut is None else _dense(shortcut)
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
        params = ConvParams.from_buffer_copy(work.first)
        params.bias_stride = bias_stride
        through = packed.shortcut
        place(params, x, packed.weights, bias, norm, shortcut, through, y, beside, overflow)
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
