"""Convolutions by torch's own operators, beside our kernels."""

from __future__ import annotations

from typing import Any

import torch

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops import conv_problem as problems
from lib_rocm_sd.ops.base import Launch, Variant
from lib_rocm_sd.ops.conv_problem import Band, ConvProblem, NextNorm, given
from lib_rocm_sd.ops.conv_weights import ConvWeights


class TorchConv(Variant[ConvProblem]):
    """torch's convolution (MIOpen, cuDNN or its own) on a channels-last view; the rest eager."""

    name = "torch"

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
    ) -> Any:
        y = problems.convolve(self.kind, x, weights, norm, shortcut, band)
        if overflow is not None and not y.isfinite().all():
            overflow.fill_(1)
        if next_norm is None:
            return y, None
        statistics = problems.statistics_of_rows(y[..., : weight.shape[0]])
        return y, given(statistics[:, None], next_norm, band)
