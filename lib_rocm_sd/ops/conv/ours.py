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
from functools import lru_cache, partial

import torch

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import KernelSpec, Launch, Variant, halves_only, reasons
from lib_rocm_sd.ops.conv import kernel, layout, rows, split
from lib_rocm_sd.ops.conv import problem as problems
from lib_rocm_sd.ops.conv.formula import given
from lib_rocm_sd.ops.conv.kernel import ConvConfig, ConvForm, ConvParams
from lib_rocm_sd.ops.conv.problem import Band, ConvInputs, ConvProblem, Result
from lib_rocm_sd.ops.conv.split import Summed, launch_sum
from lib_rocm_sd.ops.conv.weights import PackedWeights, matrix_of
from lib_rocm_sd.ops.group_norm.kernel import GroupNormConfig, finalize_spec, merge_spec
from lib_rocm_sd.ops.group_norm.launch import launch_finalize, launch_merge

_LIBRARY_IS_FAST = ("mfma", "mma_sm80")
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
                not p.in_rows
                and not kernel.configs(arch, self.form(p), p.out_channels, p.in_place),
                f"no work-group makes all {p.out_channels} channels, as it must in place",
            ),
        )

    def preference_for(self, arch: Arch | None, problem: ConvProblem) -> int:
        """With weights as they lie, behind a library's on CDNA and NVIDIA: MIOpen and cuDNN are
        fast there with channels-last halves, which MIOpen is not on RDNA (docs/unet.md).
        """
        matrix = "" if arch is None else arch.matrix
        behind = problem.in_rows and matrix in _LIBRARY_IS_FAST
        return _BEHIND if behind else self.preference

    def input_refusals(self, inputs: ConvInputs) -> list[str]:
        return problems.input_refusals(inputs)

    def workspace(self, problem: ConvProblem) -> int:
        """The sums of a small image, whose channels are split."""
        return split.workspace_bytes(problem)

    def configs(self, arch: Arch | None, problem: ConvProblem) -> Sequence[ConvConfig]:
        return split.configs(arch, self.form(problem), problem) if arch else ()

    @staticmethod
    def form(problem: ConvProblem) -> ConvForm:
        """What the kernel is compiled for."""
        p = problem
        fused = (p.kind, p.dtype, p.norm, p.shortcut, p.statistics)
        if p.in_rows:
            return ConvForm(*fused, in_rows=True)
        return ConvForm(*fused, kernel.chunk_of(p.in_channels, p.kind))

    def specs(self, arch: Arch, problem: ConvProblem, config: ConvConfig) -> Sequence[KernelSpec]:
        merge = (merge_spec(_MERGE), finalize_spec(_MERGE)) if problem.statistics else ()
        added = (kernel.sum_spec(problem.dtype),) if config.splits > 1 else ()
        pack = () if problem.in_rows else (kernel.pack_spec(problem.dtype),)
        return (kernel.spec(self.form(problem), config), *pack, *added, *merge)

    def run(
        self,
        launch: Launch | None,
        config: ConvConfig,
        problem: ConvProblem,
        inputs: ConvInputs,
    ) -> Result:
        if launch is None:
            raise ValueError("MatrixConv needs a launch")
        x, weights, norm, shortcut, next_norm, overflow, band, out, finish, embedding, _ = inputs
        x, in_stride = _dense(x)
        shortcut, shortcut_stride = (None, 0) if shortcut is None else _dense(shortcut)
        if problem.in_rows:
            packed = _as_they_lie(inputs)
        else:
            packed = weights.packed(self.kind, x, shortcut, launch, config)
        bias, bias_stride = weights.bias_rows(packed.bias, embedding)
        made, tiling, spec = _launching(problem, config, band, packed.co)
        y = x.new_empty(made) if out is None else out
        beside = _beside(y, config, tiling, packed.co, next_norm is not None)
        params = ConvParams(
            *(0 if t is None else t.data_ptr() for t in (x, packed.weights, bias, norm)),
            *(0 if t is None else t.data_ptr() for t in (shortcut, packed.shortcut, y)),
            *(0 if t is None else t.data_ptr() for t in (beside, overflow)),
            *(*x.shape[1:], tiling.rows, tiling.columns, packed.co),
            *(y.shape[3], problem.shortcut_channels, in_stride, shortcut_stride),
            *(layout.pixel_stride(y), tiling.tiles_x, tiling.tiles_y, tiling.blocks_co),
            *(*y.shape[1:3], 0 if band is None else band.above),
            *(problem.kind == "3x3 stride 2 padded", bias_stride, config.splits),
            problem.out_channels,
        )
        grid = tiling.parts * tiling.blocks_co * problem.batch * config.splits
        launch(spec, grid, config.block, params, x.device)
        if beside is None:
            return y, None
        phases = tiling.phases
        if config.splits > 1:
            added = shortcut if problem.shortcut == "identity" else None
            what = Summed(bias, bias_stride, y, added, overflow, next_norm is not None)
            statistics, phases = launch_sum(launch, beside, what), 1
        else:
            statistics = launch_merge(launch, _MERGE, beside, packed.co, tiling.tiles_x)
        if statistics is None:
            return y, None
        finish = finish or partial(launch_finalize, launch, _MERGE)
        return y, given(statistics, phases, next_norm, band, finish)


def _beside(
    y: torch.Tensor, config: ConvConfig, tiling: kernel.ConvTiling, co: int, statistics: bool
) -> torch.Tensor | None:
    """Memory for what is made beside y (N, H, W, C): its statistics, (N, parts, co, 4), or before
    it, where channels are split: sums, (N, splits, H, W, co).
    """
    if config.splits > 1:
        return y.new_empty((y.shape[0], config.splits, *y.shape[1:3], co), dtype=torch.float32)
    if statistics:
        return y.new_empty((y.shape[0], tiling.parts, co, 4), dtype=torch.float32)
    return None


_MERGE = GroupNormConfig(256, 4)


def _rows_refusals(p: ConvProblem) -> list[str]:
    """Of weights that are read as they lie."""
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


@lru_cache(maxsize=1024)
def _launching(
    problem: ConvProblem, config: ConvConfig, band: Band | None, co: int
) -> tuple[tuple[int, int, int, int], kernel.ConvTiling, KernelSpec]:
    """What is made, by which work-groups of which kernel."""
    shape = problems.made_shape(problem, band)
    cut_as = "3x3" if problem.in_rows else problem.kind
    tiling = kernel.tiling(cut_as, *shape[1:3], co, config)
    return shape, tiling, kernel.spec(MatrixConv.form(problem), config)


def _dense(image: torch.Tensor) -> tuple[torch.Tensor, int]:
    """An image whose pixels are dense, a copy if need be, and its pixel stride."""
    step = layout.pixel_stride(image)
    if step is None:
        image = image.clone(memory_format=torch.contiguous_format)
        step = image.shape[3]
    return image, step
