"""Convolutions by torch's own (MIOpen, cuDNN or its own code), beside our kernels.

MIOpen's search for an algorithm takes from seconds to minutes for every new size. It is never
started to find out which variant is fastest: LibraryConv asks for MIOpen's immediate mode, which
does not search, and refuses where this torch does not offer it (before 2.8). TorchConv, which does
what the host would have done, is measured never and runs where all else failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch user knows

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops import conv_problem as problems
from lib_rocm_sd.ops import group_norm_kernel, group_norm_launch
from lib_rocm_sd.ops.base import KernelSpec, Launch, Variant, reasons
from lib_rocm_sd.ops.conv_problem import Band, ConvProblem, NextNorm, given
from lib_rocm_sd.ops.conv_weights import ConvWeights
from lib_rocm_sd.ops.group_norm_kernel import GroupNormConfig


@contextmanager
def no_search() -> Iterator[None]:
    """torch's convolutions are computed without a search for the fastest algorithm."""
    cudnn = torch.backends.cudnn
    flags: AbstractContextManager[Any] = nullcontext()
    if cudnn.benchmark:
        flags = cudnn.flags(cudnn.enabled, False, None, cudnn.deterministic, cudnn.allow_tf32)
    miopen = getattr(torch.backends, "miopen", None)
    immediate = nullcontext() if miopen is None else miopen.flags(immediate=True)
    with flags, immediate:
        yield


def searches() -> bool:
    """True where MIOpen would search although asked not to."""
    return torch.version.hip is not None and not hasattr(torch.backends, "miopen")


class LibraryConv(Variant[ConvProblem]):
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

    def input_refusals(self, *inputs: Any) -> list[str]:
        x, weight = inputs[:2]
        wanted = x.requires_grad or weight.requires_grad
        return reasons(
            (
                torch.is_grad_enabled() and wanted,
                "gradients are wanted, the kernels are forward only",
            ),
        )

    def workspace(self, problem: ConvProblem) -> int:
        """Images that our convolution never makes: normalised, upsampled, of the shortcut."""
        p = problem
        rows, columns = p.out_size
        values = p.height * p.width * p.in_channels * p.norm
        values += rows * columns * p.out_channels * (p.shortcut == "conv")
        values += p.in_channels * (rows * columns if p.kind == "upsample" else 0)
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
        return (*apply, group_norm_kernel.finish_spec(p.dtype, shortcut, p.statistics, config))

    def run(
        self,
        launch: Launch | None,
        config: GroupNormConfig,
        x: torch.Tensor,
        weight: torch.Tensor,
        norm: torch.Tensor | None,
        shortcut: torch.Tensor | None,
        weights: ConvWeights,
        next_norm: NextNorm | None,
        overflow: torch.Tensor | None,
        band: Band | None = None,
        out: torch.Tensor | None = None,
    ) -> Any:
        if launch is None:
            raise ValueError("LibraryConv needs a launch")
        image = x.contiguous().permute(0, 3, 1, 2)
        if norm is not None:
            image = group_norm_launch.launch_apply(launch, config, image, norm, True)
        weight, bias, shortcut_weight = weights.plain(x)
        with no_search():
            y = problems.convolve_plain(self.kind, image[:, : weight.shape[1]], weight, band)
        y = y.contiguous()
        if shortcut is not None and shortcut_weight is not None:
            shortcut = F.linear(shortcut, shortcut_weight)
        shortcut = None if shortcut is None else shortcut.contiguous()
        statistics = group_norm_launch.launch_finish(
            launch, config, y, weights.bias_on(x.device), shortcut, overflow, next_norm is not None
        )
        if out is not None:
            y = out.copy_(y)
        if statistics is None:
            return y, None
        return y, given(statistics[:, None], next_norm, band)


class TorchConv(Variant[ConvProblem]):
    """torch's convolution on a channels-last view; the rest eager."""

    name = "torch"
    last_resort = True

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def refusals(self, arch: Arch | None, problem: ConvProblem) -> list[str]:
        return []

    def workspace(self, problem: ConvProblem) -> int:
        """Images that the kernel never makes: normalised, upsampled, padded, unfused shortcut."""
        rows, columns = problem.out_size
        of_input = problem.height * problem.width * problem.in_channels
        of_output = rows * columns * problem.out_channels
        images = of_input * 2 * problem.norm + of_output * (problem.shortcut != "none")
        images += rows * columns * problem.in_channels * (problem.kind != "3x3")
        return 2 * problem.batch * images

    def run(
        self,
        launch: Launch | None,
        config: None,
        x: torch.Tensor,
        weight: torch.Tensor,
        norm: torch.Tensor | None,
        shortcut: torch.Tensor | None,
        weights: ConvWeights,
        next_norm: NextNorm | None,
        overflow: torch.Tensor | None,
        band: Band | None = None,
        out: torch.Tensor | None = None,
    ) -> Any:
        y = problems.convolve(self.kind, x, weights, norm, shortcut, band)
        y = y if out is None else out.copy_(y)
        if overflow is not None and not y.isfinite().all():
            overflow.fill_(1)
        if next_norm is None:
            return y, None
        statistics = problems.statistics_of_rows(y[..., : weight.shape[0]])
        return y, given(statistics[:, None], next_norm, band)
