"""The gradients of GroupNorm, and of SiLU after it, by our kernels."""

from __future__ import annotations

from collections.abc import Sequence

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import Call, KernelSpec, Variant, one_launch, reasons
from lib_rocm_sd.ops.gradients import gradient_refusals
from lib_rocm_sd.ops.group_norm.ours import KernelGroupNorm
from lib_rocm_sd.ops.group_norm_backward import kernel
from lib_rocm_sd.ops.group_norm_backward.formula import Made
from lib_rocm_sd.ops.group_norm_backward.inputs import GroupNormBackwardInputs
from lib_rocm_sd.ops.group_norm_backward.kernel import BackwardConfig
from lib_rocm_sd.ops.group_norm_backward.launch import launch_backward
from lib_rocm_sd.ops.group_norm_backward.problem import GroupNormBackwardProblem


class KernelGroupNormBackward(Variant[GroupNormBackwardProblem, GroupNormBackwardInputs]):
    """kernels/group_norm_backward.hip after the forward pass's kernels, which make the norm anew.
    No image of float32 is ever made.
    """

    name = "rocm_sd"
    ours = True
    preference = 20

    def refusals(self, arch: Arch | None, problem: GroupNormBackwardProblem) -> list[str]:
        p, found = problem, KernelGroupNorm().refusals(arch, problem)
        if found or arch is None or not p.parts:
            return found
        (config,) = self.configs(arch, p)
        grids = [
            kernel.tiling(p.batch, p.channels, p.pixels, p.form, config.steps, sums).grid
            for sums in (True, False)
        ]
        items = max(*grids, p.batch * p.groups) * config.threads
        return reasons(one_launch(items))

    def input_refusals(self, inputs: GroupNormBackwardInputs) -> list[str]:
        return gradient_refusals(*inputs)

    def workspace(self, problem: GroupNormBackwardProblem) -> int:
        """Statistics, norm, sums, totals and factors."""
        return problem.batch * problem.channels * (problem.parts * 24 + 32)

    def configs(
        self, arch: Arch | None, problem: GroupNormBackwardProblem
    ) -> Sequence[BackwardConfig]:
        p = problem
        return kernel.configs(arch, p.channels, p.pixels, p.groups, p.form) if arch else ()

    def specs(
        self, arch: Arch, problem: GroupNormBackwardProblem, config: BackwardConfig
    ) -> Sequence[KernelSpec]:
        p = problem
        own = kernel.own_specs(p.form, p.silu, p.affine, config.steps)
        return (*kernel.norm_specs(p.form, config), *(own if p.wanted else own[:-1]))

    def run(self, call: Call[GroupNormBackwardProblem, GroupNormBackwardInputs]) -> Made:
        return launch_backward(call)
