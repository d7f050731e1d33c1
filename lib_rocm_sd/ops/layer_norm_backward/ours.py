"""The gradients of LayerNorm by our kernels."""

from __future__ import annotations

from collections.abc import Sequence

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import Call, KernelSpec, Variant, halves_only, one_launch, reasons
from lib_rocm_sd.ops.gradients import gradient_refusals
from lib_rocm_sd.ops.layer_norm.kernel import AFFINE_KINDS, LayerNormConfig, tiling
from lib_rocm_sd.ops.layer_norm_backward import gradients, kernel
from lib_rocm_sd.ops.layer_norm_backward.formula import Made
from lib_rocm_sd.ops.layer_norm_backward.inputs import LayerNormBackwardInputs
from lib_rocm_sd.ops.layer_norm_backward.launch import form_of, launch_backward
from lib_rocm_sd.ops.layer_norm_backward.problem import LayerNormBackwardProblem


class KernelLayerNormBackward(Variant[LayerNormBackwardProblem, LayerNormBackwardInputs]):
    """kernels/layer_norm_backward.hip: x's gradient in one launch, also of a sum; two more for
    gamma's and beta's.
    """

    name = "rocm_sd"
    ours = True
    preference = 20

    def refusals(self, arch: Arch | None, problem: LayerNormBackwardProblem) -> list[str]:
        if arch is None:
            return ["no supported GPU"]
        p = problem
        found = reasons(
            halves_only(p.dtype),
            (p.affine not in AFFINE_KINDS, f"gamma in {p.affine}"),
            (p.channels >= 1 << 31, f"rows of {p.channels} are more than the kernel counts"),
        )
        if found or not p.channels:
            return found
        (config,) = kernel.configs(arch, p.channels)
        items = tiling(p.channels, config).grid(p.rows, config) * config.threads
        return reasons(one_launch(items))

    def input_refusals(self, inputs: LayerNormBackwardInputs) -> list[str]:
        return gradient_refusals(*inputs)

    def workspace(self, problem: LayerNormBackwardProblem) -> int:
        """Mean and scale of each row, and parts."""
        p = problem
        if not p.wanted or not p.rows or not p.channels:
            return 0
        return p.rows * 8 + kernel.parts_tiling(p.rows, p.channels).parts * p.channels * 8

    def configs(
        self, arch: Arch | None, problem: LayerNormBackwardProblem
    ) -> Sequence[LayerNormConfig]:
        return kernel.configs(arch, problem.channels) if arch else ()

    def specs(
        self, arch: Arch, problem: LayerNormBackwardProblem, config: LayerNormConfig
    ) -> Sequence[KernelSpec]:
        p, first = problem, kernel.input_spec(form_of(problem, config), config)
        if not p.wanted:
            return (first,)
        vector = kernel.parts_tiling(max(p.rows, 1), p.channels).vector
        return (first, kernel.parts_spec(p.dtype, p.added, vector), gradients.spec())

    def run(self, call: Call[LayerNormBackwardProblem, LayerNormBackwardInputs]) -> Made:
        return launch_backward(call)
