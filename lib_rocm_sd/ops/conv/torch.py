"""Convolutions by torch's own (MIOpen, cuDNN or its own code), beside our kernels.

MIOpen's search for an algorithm takes from seconds to minutes for every new size. It is never
started to find out which variant is fastest: LibraryConv asks for MIOpen's immediate mode, which
does not search, and refuses where this torch does not offer it (before 2.8). TorchConv, which does
what the host would have done, is measured never and runs where all else failed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import ITEM_BYTES, Call, KernelSpec, Run, Variant, reasons
from lib_rocm_sd.ops.bound import Bound
from lib_rocm_sd.ops.conv import formula
from lib_rocm_sd.ops.conv import inputs as conv_inputs
from lib_rocm_sd.ops.conv import problem as problems
from lib_rocm_sd.ops.conv.formula import given
from lib_rocm_sd.ops.conv.inputs import ConvInputs, Result
from lib_rocm_sd.ops.conv.ours import ALIGNED_BYTES, lies_densely
from lib_rocm_sd.ops.conv.problem import Band, ConvProblem
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.ops.group_norm import kernel
from lib_rocm_sd.ops.group_norm import kernel as group_norm_kernel
from lib_rocm_sd.ops.group_norm import launch as group_norm_launch
from lib_rocm_sd.ops.group_norm.formula import norm_from
from lib_rocm_sd.ops.group_norm.kernel import GroupNormConfig, ImageParams, NormTiling
from lib_rocm_sd.ops.group_norm.launch import launch_finalize
from lib_rocm_sd.ops.kernel_variant import KernelVariant
from lib_rocm_sd.ops.lazily import F, is_there, torch

# MIOpen's search for an algorithm, and how it is kept from it.


def no_search() -> AbstractContextManager[Any]:
    """torch's convolutions are computed without a search for the fastest algorithm."""
    if torch.version.hip is None and not torch.backends.cudnn.benchmark:
        return _NOTHING
    return _WITHOUT_SEARCH


@contextmanager
def _without_search() -> Iterator[None]:
    cudnn, miopen = torch.backends.cudnn, _miopen()
    flags: AbstractContextManager[Any] = nullcontext()
    if cudnn.benchmark:
        flags = cudnn.flags(cudnn.enabled, False, None, cudnn.deterministic, cudnn.allow_tf32)
    immediate = nullcontext() if miopen is None else miopen.flags(immediate=True)
    with flags, immediate:
        yield


class Flags(AbstractContextManager[None]):
    """Flags of the process that several threads set at once, by what `setting` makes: the first
    sets them, the last puts them back.
    """

    def __init__(self, setting: Callable[[], AbstractContextManager[Any]]) -> None:
        self._setting, self._stack = setting, ExitStack()
        self._lock, self._inside = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._stack.enter_context(self._setting())
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._stack.close()


_NOTHING: AbstractContextManager[Any] = nullcontext()
_WITHOUT_SEARCH = Flags(_without_search)


def searches() -> bool:
    """True where MIOpen would search although asked not to."""
    return is_there() and torch.version.hip is not None and _miopen() is None


def _miopen() -> Any:
    return getattr(torch.backends, "miopen", None)


# torch's convolution with weights as they lie and the passes around it, called again and again.


_WORD_BYTES = 8


def convolved(
    kind: str, image: torch.Tensor, weight: torch.Tensor, band: Band | None = None
) -> torch.Tensor:
    """The bare convolution (N, Ho, Wo, Co), contiguous, of a channels-last image (N, Ci, H, W)."""
    result = formula.convolve_plain(kind, image, weight, band, enlarge=enlarged)
    return result.contiguous()


def enlarged(image: torch.Tensor) -> torch.Tensor:
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
        x, weights, norm, shortcut, next_norm, overflow, _, _, finish, *_ = inputs
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
    out = x.new_empty(x.shape)
    try:
        packet = bound.free.pop()
    except IndexError:
        packet = bound.new()
    params = packet.params
    params.x, params.out, params.norm = x.data_ptr(), out.data_ptr(), norm.data_ptr()
    packet.launch()
    bound.free.append(packet)
    return out


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
        weights, statistics = inputs.weights, None
        bias, stride = weights.bias_rows(weights.bias_on(y.device), inputs.embedding)
        if self._made is not None:
            statistics = y.new_empty(self._made, dtype=torch.float32)
        try:
            packet = self.free.pop()
        except IndexError:
            packet = self.new()
        params = packet.params
        params.x, params.out = bare_at, y_at = bare.data_ptr(), y.data_ptr()
        params.shortcut = shortcut_at = 0 if shortcut is None else shortcut.data_ptr()
        params.bias, params.bias_stride = bias.data_ptr(), stride
        params.statistics = 0 if statistics is None else statistics.data_ptr()
        params.aligned = (bare_at | y_at | shortcut_at) % ALIGNED_BYTES == 0
        packet.launch()
        self.free.append(packet)
        return statistics


def bound_library(call: Call[ConvProblem, ConvInputs], run: Run) -> Run:
    """With weights as they lie, of whole images, where the launcher can prepare a launch."""
    launch, problem, inputs = call.launch, call.problem, call.inputs
    whole = inputs.band is None and inputs.out is None
    if getattr(launch, "prepare", None) is None or not problem.in_rows or not whole:
        return run
    return BoundLibrary(launch, call.config, problem, inputs.x.device, run)


class LibraryConv(KernelVariant[ConvProblem, ConvInputs]):
    """torch's convolution, and all around it by two passes of kernels/group_norm_silu.hip."""

    name = "torch + rocm_sd"
    preference = 10

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def kernel_refusals(self, arch: Arch, problem: ConvProblem) -> list[str]:
        p = problem
        return reasons(
            (p.dtype not in group_norm_kernel.DTYPES, f"{p.dtype}: the kernels take fp16 and bf16"),
            (p.out_channels % 8, f"{p.out_channels} output channels are no multiple of 8"),
            (p.epilogue is not None, "an activation or a scale after it"),
            (searches(), "this torch cannot keep MIOpen from searching (2.8 and newer can)"),
        )

    def input_refusals(self, inputs: ConvInputs) -> list[str]:
        return conv_inputs.input_refusals(inputs)

    def workspace(self, problem: ConvProblem) -> int:
        """Images that our convolution never makes: normalised, upsampled, of the shortcut, bare."""
        p = problem
        rows, columns = p.out_size
        values = p.height * p.width * p.in_channels * p.norm
        bare = p.in_rows and not p.statistics
        values += rows * columns * p.out_channels * ((p.shortcut == "conv") + bare)
        enlarged = p.in_channels if p.in_rows else p.out_channels
        values += enlarged * (rows * columns if p.kind == "upsample" else 0)
        values += p.in_channels * (p.height * p.width if p.kind == "3x3 stride 2" else 0)
        return 2 * p.batch * values

    def configs(self, arch: Arch | None, problem: ConvProblem) -> Sequence[GroupNormConfig]:
        return group_norm_kernel.configs(arch)[:1] if arch else ()

    def specs(
        self, arch: Arch, problem: ConvProblem, config: GroupNormConfig
    ) -> Sequence[KernelSpec]:
        p = problem
        form = group_norm_kernel.form_of(p.dtype, p.in_channels, True)
        apply = (group_norm_kernel.apply_spec(form, True, config),) if p.norm else ()
        shortcut = p.shortcut != "none"
        phases = p.kind == "upsample" and not p.in_rows
        finish = group_norm_kernel.finish_spec(p.dtype, shortcut, p.statistics, phases, config)
        finalize = (group_norm_kernel.merge_spec(config), group_norm_kernel.finalize_spec(config))
        return (*apply, finish, *(finalize if p.statistics else ()))

    def bound(self, call: Call[ConvProblem, ConvInputs]) -> Run:
        return bound_library(call, self.run)

    def run(self, call: Call[ConvProblem, ConvInputs]) -> Result:
        launch, config, inputs = call.launcher, call.config, call.inputs
        x, weights, norm, shortcut, next_norm, overflow, band, out, finish, embedding, *_ = inputs
        image = x.contiguous().permute(0, 3, 1, 2)
        if norm is not None:
            image = group_norm_launch.launch_apply(launch, config, image, norm, True)
        y, result, above = self._convolve(image, weights, band)
        shortcut_weight = weights.plain(x)[2] if inputs.shortcut_weight is None else inputs.through
        if shortcut is not None and shortcut_weight is not None:
            shortcut = F.linear(shortcut, shortcut_weight)
        shortcut = None if shortcut is None else shortcut.contiguous()
        statistics = None
        if y is not result or overflow is not None or is_unfinished(inputs):
            bias, _ = weights.bias_rows(weights.bias_on(x.device), embedding)
            statistics = group_norm_launch.launch_finish(
                launch, config, y, result, bias, shortcut, overflow, next_norm is not None, above
            )
        del y
        if out is not None:
            result = out.copy_(result)
        if statistics is None:
            return result, None
        finish = finish or partial(group_norm_launch.launch_finalize, launch, config)
        return result, given(statistics, 1, next_norm, band, finish)

    def _convolve(
        self,
        image: torch.Tensor,
        weights: ConvWeights,
        band: Band | None,
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The bare convolution of (N, Ci, H, W), what is to be made of it, and rows to skip.

        Upsampling is one convolution of the small image by 2x2 taps to four times the channels; by
        weights of which no copy is to be made, one of the large image.
        """
        with no_search():
            if self.kind != "upsample" or weights.in_rows:
                weight = weights.plain(image)[0]
                image = image[:, : weight.shape[1]]
                y = convolved(self.kind, image, weight, band)
                return y, y, 0
            weight = weights.phases(image)
            y = F.conv2d(image[:, : weight.shape[1]], weight, padding=1)
        batch, _, height, width = image.shape
        rows = 2 * height if band is None else band.rows
        result = y.new_empty((batch, rows, 2 * width, weight.shape[0] // 4))
        return y.permute(0, 2, 3, 1).contiguous(), result, 0 if band is None else band.above


class PlanarConv(LibraryConv):
    """The same with image and weights copied to NCHW, and the result back: so MIOpen has its
    Winograd convolutions, which it has not for NHWC. For a UNet's weights, as they lie.
    """

    name = "torch NCHW + rocm_sd"
    preference = 1

    def refusals(self, arch: Arch | None, problem: ConvProblem) -> list[str]:
        planar = (not problem.in_rows, "only for a UNet's weights, as they lie")
        return super().refusals(arch, problem) + reasons(planar)

    def workspace(self, problem: ConvProblem) -> int:
        """And the copies."""
        p = problem
        rows, columns = p.out_size
        image = p.batch * p.height * p.width * p.in_channels
        out_values = p.batch * rows * columns * p.out_channels
        weights = 9 * p.in_channels * p.out_channels
        return super().workspace(problem) + 2 * (image + out_values + weights)

    def bound(self, call: Call[ConvProblem, ConvInputs]) -> Run:
        return self.run

    def _convolve(
        self,
        image: torch.Tensor,
        weights: ConvWeights,
        band: Band | None,
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        weight = weights.plain(image)[0].contiguous()
        planes = image[:, : weight.shape[1]].contiguous()
        with no_search():
            y = formula.convolve_plain(self.kind, planes, weight, band).contiguous()
        return y, y, 0


class TorchConv(Variant[ConvProblem, ConvInputs]):
    """torch's convolution on a channels-last view; the rest eager."""

    name = "torch"
    last_resort = "convolution"

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def workspace(self, problem: ConvProblem) -> int:
        """What the kernel never makes: normalised in float32, enlarged, padded, unfused sums."""
        p = problem
        rows, columns = p.out_size
        itemsize = ITEM_BYTES[p.dtype]
        before = p.batch * p.height * p.width * p.in_channels
        out_values = p.batch * rows * columns * p.out_channels
        wide = before * (12 + itemsize) * p.norm
        enlarged = before * itemsize * {"upsample": 4, "3x3 stride 2": 1}.get(p.kind, 0)
        images = 2 + p.in_place + (p.epilogue is not None)
        results = out_values * itemsize * images + p.statistics * out_values // 4
        return wide + enlarged + results

    def run(self, call: Call[ConvProblem, ConvInputs]) -> Result:
        inputs = call.inputs
        x, weights, norm, shortcut, next_norm, overflow, band, out, finish, *_ = inputs
        fused = inputs.embedding, inputs.shortcut_weight, inputs.epilogue, inputs.second
        if weights.in_rows and x.device.type == "cpu" and x.dtype.itemsize == 2:
            wide = x.float(), weights, norm, None if shortcut is None else shortcut.float()
            y = formula.convolve(self.kind, *wide, band, *fused).to(x.dtype)
        else:
            y = formula.convolve(self.kind, x, weights, norm, shortcut, band, *fused)
        y = y if out is None else out.copy_(y)
        if overflow is not None and not y.isfinite().all():
            overflow.fill_(1)
        if next_norm is None:
            return y, None
        statistics = formula.statistics_of_rows(y[..., : weights.weight.shape[0]])
        return y, given(statistics, 1, next_norm, band, finish or norm_from)
