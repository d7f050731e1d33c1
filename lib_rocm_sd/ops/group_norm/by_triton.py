"""GroupNorm and SiLU by our kernels in Triton, where Triton is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops import optional
from lib_rocm_sd.ops.base import Call, Variant, reasons
from lib_rocm_sd.ops.gradients import gradient_refusals
from lib_rocm_sd.ops.group_norm.formula import dense
from lib_rocm_sd.ops.group_norm.inputs import GroupNormInputs
from lib_rocm_sd.ops.group_norm.problem import GroupNormProblem
from lib_rocm_sd.ops.in_triton import triton_refusals
from lib_rocm_sd.ops.lazily import torch

RUN = "lib_rocm_sd.triton_kernels.group_norm_run"
MOST_WIDTH = 1024
"""Channels of a group: one program merges them."""


class TritonGroupNorm(Variant[GroupNormProblem, GroupNormInputs]):
    """triton_kernels/group_norm.py: statistics, their merge, and a pass that applies it."""

    name = "triton"
    untried = True

    def refusals(self, arch: Arch | None, problem: GroupNormProblem) -> list[str]:
        p, width = problem, problem.channels // problem.groups
        return triton_refusals(arch, RUN) or reasons(
            (p.dtype == "float64", "float64: it computes in float32"),
            (p.added, "something is added to the image"),
            (width > MOST_WIDTH, f"{width} channels of a group: it takes up to {MOST_WIDTH}"),
            (p.channels * p.pixels >= 1 << 31, "an image has more than 2^31 values"),
        )

    def input_refusals(self, inputs: GroupNormInputs) -> list[str]:
        x, gamma, beta = inputs[:3]
        apart = [t for t in (gamma, beta) if t is not None and len(t) > 1 and t.stride(0) != 1]
        return reasons((apart, "gamma or beta has gaps")) + gradient_refusals(x, gamma, beta)

    def configs(self, arch: Arch | None, problem: GroupNormProblem) -> Sequence[Any]:
        if optional.absent("triton", RUN):
            return (None,)
        found: Sequence[Any] = optional.module(RUN).CONFIGS
        return found

    def run(self, call: Call[GroupNormProblem, GroupNormInputs]) -> torch.Tensor:
        x, gamma, beta, groups, eps, silu, _ = call.inputs
        image, last = dense(x)
        made: torch.Tensor = optional.module(RUN).run(
            call.config, image, last, gamma, beta, groups, eps, silu
        )
        return made
