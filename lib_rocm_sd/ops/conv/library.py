"""torch's convolution with weights as they lie and the passes around it, called again and again."""

from __future__ import annotations

from functools import partial
from typing import Any

from lib_rocm_sd.ops.base import Call, Run
from lib_rocm_sd.ops.bound import Bound
from lib_rocm_sd.ops.conv import formula
from lib_rocm_sd.ops.conv import problem as problems
from lib_rocm_sd.ops.conv.call import ALIGNED_BYTES, lies_densely
from lib_rocm_sd.ops.conv.inputs import ConvInputs, Result
from lib_rocm_sd.ops.conv.problem import Band, ConvProblem
from lib_rocm_sd.ops.conv.search import no_search
from lib_rocm_sd.ops.group_norm import kernel
from lib_rocm_sd.ops.group_norm.kernel import GroupNormConfig, ImageParams, NormTiling
from lib_rocm_sd.ops.group_norm.launch import launch_finalize
from lib_rocm_sd.ops.lazily import F, torch

_WORD_BYTES = 8


def convolved(
    kind: str, image: torch.Tensor, weight: torch.Tensor, band: Band | None = None
) -> torch.Tensor:
    """The bare convolution (N, Ho, Wo, Co), contiguous, of a channels-last image (N, Ci, H, W)."""
    made = formula.convolve_plain(kind, image, weight, band, enlarge=_copied)
    return made.contiguous()


def _copied(image: torch.Tensor) -> torch.Tensor:
    """formula.enlarged, by copies of eight bytes at once: torch's own kernel for channels-last
    images finds the pixel of each value anew.
    """
    pixels = image.permute(0, 2, 3, 1)
    size = pixels.element_size()
    batch, height, width, channels = pixels.shape
    odd = channels * size, pixels.storage_offset() * size, pixels.data_ptr()
    if not pixels.is_contiguous() or any(each % _WORD_BYTES for each in odd):
        return formula.enlarged(image)
    words = pixels.reshape(-1).view(torch.int64).view(batch, height, 1, width, 1, -1)
    four = words.expand(batch, height, 2, width, 2, words.shape[5]).contiguous()
    made = four.view(-1).view(image.dtype).view(batch, 2 * height, 2 * width, channels)
    return made.permute(0, 3, 1, 2)


def is_unfinished(inputs: ConvInputs) -> bool:
    """Whether a bare convolution lacks anything."""
    added = inputs.embedding is not None or inputs.shortcut is not None
    return added or inputs.next_norm is not None or inputs.weights.has_bias


class BoundLibrary:
    """Callable like `Variant.run`, for whole images. Those that do not lie densely from a multiple
    of 16 bytes on, and a flag of overflows, go to `run`.
    """

    def __init__(
        self,
        launch: Any,
        config: GroupNormConfig,
        problem: ConvProblem,
        device: torch.device,
        run: Run,
    ) -> None:
        p = problem
        self._run = run
        self._apply = _applying(launch.prepare, config, p, device) if p.norm else None
        self._finish = _Finish(launch.prepare, config, p, device)
        self._made = None if p.statistics else problems.output_shape(p)

    def __call__(self, call: Call[Any, ConvInputs]) -> Result:
        problem, inputs = call.problem, call.inputs
        x, weights, norm, shortcut, next_norm, overflow, _, _, finish, _, _ = inputs
        dense = lies_densely(x) and (shortcut is None or lies_densely(shortcut))
        if not dense or overflow is not None:
            return self._run(call)  # type: ignore[no-any-return]
        # What a graph wants elsewhere is asked for first, and made there by the last pass.
        unfinished = is_unfinished(inputs)
        y = x.new_empty(self._made) if unfinished and self._made is not None else None
        image = x if self._apply is None or norm is None else _applied(self._apply, x, norm)
        with no_search():
            planes = image.permute(0, 3, 1, 2)
            weight = weights.plain(x)[0]
            bare = convolved(problem.kind, planes, weight)
        if not unfinished:
            return bare, None
        if shortcut is not None and problem.shortcut == "conv":
            through = inputs.through
            assert through is not None
            shortcut = F.linear(shortcut, through)
        y = bare if y is None else y
        statistics = self._finish(bare, y, inputs, shortcut)
        if statistics is None:
            return y, None
        finish = finish or partial(launch_finalize, call.launcher, call.config)
        return y, formula.given(statistics, 1, next_norm, None, finish)


def _params(channels: int, pixels: int, tiling: NormTiling) -> ImageParams:
    """But for addresses."""
    return ImageParams(
        *(0, 0, 0, 0, channels, pixels, tiling.parts, tiling.part_pixels),
        *(tiling.width, tiling.column_blocks, tiling.units, 1, tiling.grid),
    )


def _applying(
    prepare: Any, config: GroupNormConfig, p: ConvProblem, device: torch.device
) -> Bound[ImageParams]:
    form = kernel.form_of(p.dtype, p.in_channels, True)
    pixels = p.height * p.width
    tiling = kernel.tiling(p.batch, p.in_channels, pixels, form, config, statistics=False)
    spec = kernel.apply_spec(form, True, config)
    first = _params(p.in_channels, pixels, tiling)
    return Bound(first, lambda a: prepare(spec, tiling.grid, config.threads, a, device))


def _applied(bound: Bound[ImageParams], x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    made = x.new_empty(x.shape)
    try:
        packet = bound.free.pop()
    except IndexError:
        packet = bound.new()
    params = packet.params
    params.x, params.out, params.norm = x.data_ptr(), made.data_ptr(), norm.data_ptr()
    packet.launch()
    bound.free.append(packet)
    return made


class _Finish(Bound[ImageParams]):
    """Adds what is left; the statistics, if they are wanted."""

    __slots__ = ("_made",)

    def __init__(
        self, prepare: Any, config: GroupNormConfig, p: ConvProblem, device: torch.device
    ) -> None:
        batch, height, width, channels = problems.output_shape(p)
        tiling = kernel.finish_tiling(batch, channels, height, width)
        first = _params(channels, height * width, tiling)
        first.source_rows, first.source_columns, first.columns = height, width, width
        spec = kernel.finish_spec(p.dtype, p.shortcut != "none", p.statistics, False, config)
        super().__init__(first, lambda a: prepare(spec, tiling.grid, config.threads, a, device))
        self._made = (batch, tiling.parts, channels, 4) if p.statistics else None

    def __call__(
        self,
        bare: torch.Tensor,
        y: torch.Tensor,
        inputs: ConvInputs,
        shortcut: torch.Tensor | None,
    ) -> torch.Tensor | None:
        weights, made = inputs.weights, None
        bias, stride = weights.bias_rows(weights.bias_on(y.device), inputs.embedding)
        if self._made is not None:
            made = y.new_empty(self._made, dtype=torch.float32)
        try:
            packet = self.free.pop()
        except IndexError:
            packet = self.new()
        params = packet.params
        params.x, params.out = bare_at, y_at = bare.data_ptr(), y.data_ptr()
        params.shortcut = shortcut_at = 0 if shortcut is None else shortcut.data_ptr()
        params.bias, params.bias_stride = bias.data_ptr(), stride
        params.statistics = 0 if made is None else made.data_ptr()
        params.aligned = (bare_at | y_at | shortcut_at) % ALIGNED_BYTES == 0
        packet.launch()
        self.free.append(packet)
        return made


def bound(call: Call[ConvProblem, ConvInputs], run: Run) -> Run:
    """With weights as they lie, of whole images, where the launcher can prepare a launch."""
    launch, problem, inputs = call.launch, call.problem, call.inputs
    whole = inputs.band is None and inputs.out is None
    if getattr(launch, "prepare", None) is None or not problem.in_rows or not whole:
        return run
    return BoundLibrary(launch, call.config, problem, inputs.x.device, run)
