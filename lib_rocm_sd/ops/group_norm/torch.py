"""GroupNorm and its steps by torch's operators: what runs where no kernel of ours does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops import optional
from lib_rocm_sd.ops.base import Call, Variant, reasons
from lib_rocm_sd.ops.gradients import gradient_refusals, is_transformed
from lib_rocm_sd.ops.group_norm import formula
from lib_rocm_sd.ops.group_norm.formula import dense
from lib_rocm_sd.ops.group_norm.inputs import (
    ApplyInputs,
    FinalizeInputs,
    GroupNormInputs,
    ImageInputs,
    NormInputs,
)
from lib_rocm_sd.ops.group_norm.problem import (
    ApplyProblem,
    FinalizeProblem,
    GroupNormProblem,
    ImageProblem,
    NormProblem,
)
from lib_rocm_sd.ops.lazily import F, torch
from lib_rocm_sd.ops.optional import TRITON, triton_refusals


class _Torch(Variant[Any, Any]):
    """What torch's variants have in common: they always work."""

    name = "torch"


class TorchStatistics(_Torch):
    """torch.var_mean in float32."""

    def workspace(self, problem: ImageProblem) -> int:
        return 2 * problem.image_bytes

    def run(self, call: Call[ImageProblem, ImageInputs]) -> torch.Tensor:
        return formula.statistics_of(call.inputs.x)


class TorchFinalize(_Torch):
    """The merge by torch's operators."""

    def run(self, call: Call[FinalizeProblem, FinalizeInputs]) -> torch.Tensor:
        return formula.norm_from(*call.inputs)


class TorchNorm(_Torch):
    """Statistics, of each image in one part, and their merge by torch's operators."""

    def workspace(self, problem: NormProblem) -> int:
        return 2 * problem.image_bytes

    def run(self, call: Call[NormProblem, NormInputs]) -> torch.Tensor:
        inputs = call.inputs
        pixels = inputs.x.permute(0, 2, 3, 1).flatten(1, 2)
        return formula.norm_from(formula.moments_of(pixels[:, None]), *inputs[1:])


class TorchApply(_Torch):
    """The formula by torch's operators in float32."""

    def workspace(self, problem: ApplyProblem) -> int:
        return 6 * problem.image_bytes

    def run(self, call: Call[ApplyProblem, ApplyInputs]) -> torch.Tensor:
        return formula.applied(*call.inputs)


class TorchGroupNorm(_Torch):
    """torch's group_norm, then its silu.

    In float32 where gamma or beta are of another dtype, and for halves on the CPU, for which an
    older torch has neither.
    """

    def workspace(self, problem: GroupNormProblem) -> int:
        """What SiLU reads, and torch's copies on the way from and to channels-last."""
        wide = 4 * problem.batch * problem.channels * problem.pixels * problem.added
        return problem.image_bytes * (problem.silu + 2 * problem.channels_last) + 2 * wide

    def run(self, call: Call[GroupNormProblem, GroupNormInputs]) -> torch.Tensor:
        x, gamma, beta, groups, eps, silu, added = call.inputs
        last, dtype = formula.is_channels_last(x), x.dtype
        if added is not None:
            x = x.to(added.dtype) + added[..., None, None]
        x = x.contiguous() if is_transformed() else x  # for tangents torch takes no other
        others = any(t is not None and t.dtype != x.dtype for t in (gamma, beta))
        if others or x.device.type == "cpu":
            wide = formula.wide_of(x)
            gamma, beta = (None if t is None else t.to(wide) for t in (gamma, beta))
            y = F.group_norm(x.to(wide), groups, gamma, beta, eps)
        else:
            y = F.group_norm(x, groups, gamma, beta, eps)
        y = (F.silu(y) if silu else y).to(dtype)
        return y.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if last else y.contiguous()


# GroupNorm and SiLU by our kernels in Triton, where Triton is installed.


MOST_WIDTH = 1024
"""Channels of a group: one program merges them."""


class TritonGroupNorm(Variant[GroupNormProblem, GroupNormInputs]):
    """triton_kernels/group_norm.py: statistics, their merge, and a pass that applies it."""

    name = "triton"
    untried = True

    def refusals(self, arch: Arch | None, problem: GroupNormProblem) -> list[str]:
        p, width = problem, problem.channels // problem.groups
        return triton_refusals(arch) or reasons(
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
        if optional.absent(*TRITON):
            return (None,)
        found: Sequence[Any] = optional.module(TRITON[1]).NORM_TILES
        return found

    def run(self, call: Call[GroupNormProblem, GroupNormInputs]) -> torch.Tensor:
        x, gamma, beta, groups, eps, silu, _ = call.inputs
        image, last = dense(x)
        made: torch.Tensor = optional.module(TRITON[1]).group_norm(
            call.config, image, last, gamma, beta, groups, eps, silu
        )
        return made
