"""LayerNorm, and an addition before it, by our kernel."""

from __future__ import annotations

from collections.abc import Sequence

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import KernelSpec, Launch, Run, Variant, halves_only, one_launch, reasons
from lib_rocm_sd.ops.gradients import gradient_refusals
from lib_rocm_sd.ops.layer_norm import kernel
from lib_rocm_sd.ops.layer_norm.kernel import LayerNormConfig
from lib_rocm_sd.ops.layer_norm.launch import (
    BoundCall,
    Result,
    form_of,
    launch_layer_norm,
    readable,
    template,
)
from lib_rocm_sd.ops.layer_norm.problem import LayerNormInputs, LayerNormProblem


class KernelLayerNorm(Variant[LayerNormProblem, LayerNormInputs]):
    """kernels/layer_norm.hip: x is read once, in one launch with the addition before it.

    Preferred to torch's, which launches one kernel to add, and another that reads the sum again.
    """

    name = "rocm_sd"
    ours = True
    preference = 20

    def refusals(self, arch: Arch | None, problem: LayerNormProblem) -> list[str]:
        if arch is None:
            return ["no supported GPU"]
        p = problem
        found = reasons(
            halves_only(p.dtype),
            (p.affine not in kernel.AFFINE_KINDS, f"gamma in {p.affine}"),
            (p.channels >= 1 << 31, f"rows of {p.channels} are more than the kernel counts"),
        )
        if found or not p.channels:
            return found
        items = max(
            kernel.tiling(p.channels, config).grid(p.rows, config) * config.threads
            for config in kernel.configs(arch, p.channels)
        )
        return reasons(one_launch(items))

    def input_refusals(self, inputs: LayerNormInputs) -> list[str]:
        return gradient_refusals(*inputs)

    def configs(self, arch: Arch | None, problem: LayerNormProblem) -> Sequence[LayerNormConfig]:
        return kernel.configs(arch, problem.channels) if arch else ()

    def specs(
        self, arch: Arch, problem: LayerNormProblem, config: LayerNormConfig
    ) -> Sequence[KernelSpec]:
        return (kernel.spec(form_of(problem, config), config),)

    def bound(
        self,
        launch: Launch | None,
        config: LayerNormConfig,
        problem: LayerNormProblem,
        inputs: LayerNormInputs,
    ) -> Run:
        """Where nothing has to be copied and the launcher can prepare a launch."""
        prepare = getattr(launch, "prepare", None)
        same = all(a is b for a, b in zip(readable(problem, inputs), inputs, strict=True))
        if prepare is None or not same:
            return self.run
        spec = kernel.spec(form_of(problem, config), config)
        grid = kernel.tiling(problem.channels, config).grid(problem.rows, config)
        device = inputs.x.device
        return BoundCall(
            template(problem, config, inputs),
            lambda params: prepare(spec, grid, config.threads, params, device),
        )

    def run(
        self,
        launch: Launch | None,
        config: LayerNormConfig,
        problem: LayerNormProblem,
        inputs: LayerNormInputs,
    ) -> Result:
        if launch is None:
            raise ValueError("KernelLayerNorm needs a launch")
        return launch_layer_norm(launch, config, problem, inputs)
