"""LayerNorm, and an addition before it, by our kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import Call, KernelSpec, Run, Variant, halves_only, one_launch, reasons
from lib_rocm_sd.ops.gradients import gradient_refusals
from lib_rocm_sd.ops.layer_norm import kernel
from lib_rocm_sd.ops.layer_norm.inputs import LayerNormInputs
from lib_rocm_sd.ops.layer_norm.kernel import LayerNormConfig, LayerNormParams
from lib_rocm_sd.ops.layer_norm.launch import (
    BoundCall,
    Result,
    fill,
    readable,
    spec_of,
    template,
)
from lib_rocm_sd.ops.layer_norm.problem import AnyProblem, LayerNormProblem

AnyInputs = TypeVar("AnyInputs", bound=Any)


class KernelNorm(Variant[AnyProblem, AnyInputs]):
    """kernels/layer_norm.hip: x is read once, in one launch with what is added before it."""

    name = "rocm_sd"
    ours = True
    preference = 20

    def refusals(self, arch: Arch | None, problem: AnyProblem) -> list[str]:
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

    def readable(self, problem: AnyProblem, inputs: AnyInputs) -> AnyInputs:
        """The inputs as the kernel reads them; copies where they are not."""
        raise NotImplementedError

    def fill(self, params: LayerNormParams, inputs: AnyInputs, rows_aligned: bool) -> Result:
        """The outputs, and in `params` where they and the inputs are."""
        raise NotImplementedError

    def input_refusals(self, inputs: AnyInputs) -> list[str]:
        return gradient_refusals(*inputs)

    def configs(self, arch: Arch | None, problem: AnyProblem) -> Sequence[LayerNormConfig]:
        return kernel.configs(arch, problem.channels) if arch else ()

    def specs(
        self, arch: Arch, problem: AnyProblem, config: LayerNormConfig
    ) -> Sequence[KernelSpec]:
        return (spec_of(problem, config),)

    def bound(self, call: Call[AnyProblem, AnyInputs]) -> Run:
        """Where nothing has to be copied and the launcher can prepare a launch."""
        config, problem, inputs = call.config, call.problem, call.inputs
        prepare = getattr(call.launch, "prepare", None)
        same = all(a is b for a, b in zip(self.readable(problem, inputs), inputs, strict=True))
        if prepare is None or not same:
            return self.run
        spec = spec_of(problem, config)
        grid = kernel.tiling(problem.channels, config).grid(problem.rows, config)
        device = inputs.x.device
        return BoundCall(
            template(problem, config, inputs),
            lambda params: prepare(spec, grid, config.threads, params, device),
            self.fill,
        )

    def run(self, call: Call[AnyProblem, AnyInputs]) -> Result:
        config, problem, inputs = call.config, call.problem, call.inputs
        inputs = self.readable(problem, inputs)
        params = template(problem, config, inputs)
        made = self.fill(params, inputs, bool(params.aligned))
        grid = kernel.tiling(problem.channels, config).grid(problem.rows, config)
        spec = spec_of(problem, config)
        call.launcher(spec, grid, config.threads, params, inputs.x.device)
        return made


class KernelLayerNorm(KernelNorm[LayerNormProblem, LayerNormInputs]):
    """LayerNorm, and an addition before it.

    Preferred to torch's, which launches one kernel to add, and another that reads the sum again.
    """

    def readable(self, problem: LayerNormProblem, inputs: LayerNormInputs) -> LayerNormInputs:
        return readable(problem, inputs)

    def fill(self, params: LayerNormParams, inputs: LayerNormInputs, rows_aligned: bool) -> Result:
        return fill(params, inputs, rows_aligned)
