"""Convolutions by torch's own (MIOpen, cuDNN or its own code), beside our kernels.

MIOpen's search for an algorithm takes from seconds to minutes for every new size. It is never
started to find out which variant is fastest: LibraryConv asks for MIOpen's immediate mode, which
does not search, and refuses where this torch does not offer it (before 2.8). TorchConv, which does
what the host would have done, is measured never and runs where all else failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import ITEM_BYTES, Call, KernelSpec, Run, Variant, reasons
from lib_rocm_sd.ops.conv import formula, library
from lib_rocm_sd.ops.conv import inputs as conv_inputs
from lib_rocm_sd.ops.conv.formula import given
from lib_rocm_sd.ops.conv.inputs import ConvInputs, Result
from lib_rocm_sd.ops.conv.problem import Band, ConvProblem
from lib_rocm_sd.ops.conv.search import no_search, searches
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.ops.group_norm import kernel as group_norm_kernel
from lib_rocm_sd.ops.group_norm import launch as group_norm_launch
from lib_rocm_sd.ops.group_norm.formula import norm_from
from lib_rocm_sd.ops.group_norm.kernel import GroupNormConfig
from lib_rocm_sd.ops.lazily import F, torch


class LibraryConv(Variant[ConvProblem, ConvInputs]):
    """torch's convolution, and all around it by two passes of kernels/group_norm_silu.hip."""

    name = "torch + rocm_sd"
    ours = True
    preference = 10

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def refusals(self, arch: Arch | None, problem: ConvProblem) -> list[str]:
        if arch is None:
            return ["no supported GPU"]
        p = problem
        return reasons(
            (p.dtype not in group_norm_kernel.DTYPES, f"{p.dtype}: the kernels take fp16 and bf16"),
            (p.out_channels % 8, f"{p.out_channels} output channels are no multiple of 8"),
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
        return library.bound(call, self.run)

    def run(self, call: Call[ConvProblem, ConvInputs]) -> Result:
        launch, config, inputs = call.launcher, call.config, call.inputs
        x, weights, norm, shortcut, next_norm, overflow, band, out, finish, embedding, _ = inputs
        image = x.contiguous().permute(0, 3, 1, 2)
        if norm is not None:
            image = group_norm_launch.launch_apply(launch, config, image, norm, True)
        y, result, above = self._convolve(image, weights, band)
        shortcut_weight = weights.plain(x)[2] if inputs.shortcut_weight is None else inputs.through
        if shortcut is not None and shortcut_weight is not None:
            shortcut = F.linear(shortcut, shortcut_weight)
        shortcut = None if shortcut is None else shortcut.contiguous()
        statistics = None
        if y is not result or overflow is not None or library.is_unfinished(inputs):
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
                y = library.convolved(self.kind, image, weight, band)
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
        made = p.batch * rows * columns * p.out_channels
        weights = 9 * p.in_channels * p.out_channels
        return super().workspace(problem) + 2 * (image + made + weights)

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
    last_resort = True

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def refusals(self, arch: Arch | None, problem: ConvProblem) -> list[str]:
        return []

    def workspace(self, problem: ConvProblem) -> int:
        """What the kernel never makes: normalised in float32, enlarged, padded, unfused sums."""
        p = problem
        rows, columns = p.out_size
        itemsize = ITEM_BYTES[p.dtype]
        before = p.batch * p.height * p.width * p.in_channels
        made = p.batch * rows * columns * p.out_channels
        wide = before * (12 + itemsize) * p.norm
        enlarged = before * itemsize * {"upsample": 4, "3x3 stride 2": 1}.get(p.kind, 0)
        return wide + enlarged + made * itemsize * (2 + p.in_place) + p.statistics * made // 4

    def run(self, call: Call[ConvProblem, ConvInputs]) -> Result:
        inputs = call.inputs
        x, weights, norm, shortcut, next_norm, overflow, band, out, finish, embedding, _ = inputs
        through = inputs.shortcut_weight
        if weights.in_rows and x.device.type == "cpu" and x.dtype.itemsize == 2:
            wide = x.float(), weights, norm, None if shortcut is None else shortcut.float()
            y = formula.convolve(self.kind, *wide, band, embedding, through).to(x.dtype)
        else:
            y = formula.convolve(self.kind, x, weights, norm, shortcut, band, embedding, through)
        y = y if out is None else out.copy_(y)
        if overflow is not None and not y.isfinite().all():
            overflow.fill_(1)
        if next_norm is None:
            return y, None
        statistics = formula.statistics_of_rows(y[..., : weights.weight.shape[0]])
        return y, given(statistics, 1, next_norm, band, finish or norm_from)
