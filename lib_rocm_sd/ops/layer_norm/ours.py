"""LayerNorm, and an addition before it, by our kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import Call, KernelSpec, Run, halves_only, one_launch, reasons
from lib_rocm_sd.ops.bound import Bound, Prepare
from lib_rocm_sd.ops.dtypes import DTYPES
from lib_rocm_sd.ops.kernel_variant import KernelVariant
from lib_rocm_sd.ops.layer_norm import kernel
from lib_rocm_sd.ops.layer_norm.formula import row_stride
from lib_rocm_sd.ops.layer_norm.inputs import LayerNormInputs
from lib_rocm_sd.ops.layer_norm.kernel import LayerNormConfig, LayerNormParams
from lib_rocm_sd.ops.layer_norm.problem import AnyProblem, LayerNormProblem
from lib_rocm_sd.ops.lazily import torch

# The launch of kernels/layer_norm.hip on torch tensors, once or again and again.


Result: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"


def spec_of(problem: LayerNormProblem, config: LayerNormConfig) -> KernelSpec:
    """The kernel that makes it."""
    p = problem
    held = kernel.tiling(p.channels, config).held
    return kernel.spec(p.dtype, p.first, p.affine, held, config, p.modulated, p.rms)


def readable(problem: LayerNormProblem, inputs: LayerNormInputs) -> LayerNormInputs:
    """The inputs as the kernel reads them: rows at even distances, gamma and beta dense, alike, and
    both there or none. Copies where they are not.
    """
    x, gamma, beta, eps, added = inputs
    x = x if row_stride(x) is not None else x.contiguous()
    if added is not None and row_stride(added) is None:
        added = added.contiguous()
    if problem.affine != "none":
        dtype = DTYPES[problem.affine]
        gamma = x.new_ones(x.shape[-1:], dtype=dtype) if gamma is None else gamma.to(dtype)
        beta = x.new_zeros(x.shape[-1:], dtype=dtype) if beta is None else beta.to(dtype)
        gamma, beta = gamma.contiguous(), beta.contiguous()
    return LayerNormInputs(x, gamma, beta, eps, added)


def template(problem: LayerNormProblem, config: LayerNormConfig, inputs: Any) -> LayerNormParams:
    """The argument for readable inputs, but for addresses, and whether they are aligned."""
    p, lanes = problem, kernel.tiling(problem.channels, config).lanes
    strides = [row_stride(t) for t in (inputs.x, inputs.added) if t is not None]
    return LayerNormParams(
        *(0, 0, 0, 0, 0, 0, 0, 0),
        *(strides[0], strides[-1]),
        *(p.rows, p.channels, lanes, lanes.bit_length() - 1),
        *(rows_aligned(p, inputs), inputs.eps, 1.0 / p.channels),
    )


def rows_aligned(problem: LayerNormProblem, inputs: Any) -> bool:
    """Whether all rows of readable inputs begin at multiples of 16 bytes if the first ones do."""
    apart = [problem.channels, *(row_stride(t) for t in inputs if isinstance(t, torch.Tensor))]
    return problem.rows == 1 or not any((each or 0) % kernel.VECTOR for each in apart)


def fill(params: LayerNormParams, inputs: LayerNormInputs, rows_aligned: bool) -> Result:
    """The outputs, and in `params` where they and the inputs are."""
    x, gamma, beta, _, added = inputs
    out = x.new_empty(x.shape)
    total = None
    params.x = every = x.data_ptr()
    params.out = out_at = out.data_ptr()
    every |= out_at
    if gamma is not None and beta is not None:
        params.gamma = gamma_at = gamma.data_ptr()
        params.beta = beta_at = beta.data_ptr()
        every |= gamma_at | beta_at
    if added is not None:
        total = x.new_empty(x.shape)
        params.added = added_at = added.data_ptr()
        params.sum = sum_at = total.data_ptr()
        every |= added_at | sum_at
    params.aligned = rows_aligned and not every & 15
    return out if total is None else (out, total)


class BoundCall(Bound[LayerNormParams]):
    """Callable like `Variant.run`, for inputs of one key that are readable."""

    __slots__ = ("_fill", "_rows_aligned")

    def __init__(
        self, first: LayerNormParams, prepare: Prepare, fill: Callable[..., Result]
    ) -> None:
        super().__init__(first, prepare)
        self._fill, self._rows_aligned = fill, bool(first.aligned)

    def __call__(self, call: Call[Any, Any]) -> Result:
        inputs = call.inputs
        packet = self.taken()
        packet.params.eps = inputs.eps
        made = self._fill(packet.params, inputs, self._rows_aligned)
        packet.launch()
        self.free.append(packet)
        return made


AnyInputs = TypeVar("AnyInputs", bound=Any)


class KernelNorm(KernelVariant[AnyProblem, AnyInputs]):
    """kernels/layer_norm.hip: x is read once, in one launch with what is added before it."""

    def kernel_refusals(self, arch: Arch, problem: AnyProblem) -> list[str]:
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

    def template(self, problem: AnyProblem, config: LayerNormConfig, inputs: AnyInputs) -> Any:
        """The argument for readable inputs, but for addresses, and whether they are aligned."""
        return template(problem, config, inputs)

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
            self.template(problem, config, inputs),
            lambda params: prepare(spec, grid, config.threads, params, device),
            self.fill,
        )

    def run(self, call: Call[AnyProblem, AnyInputs]) -> Result:
        config, problem, inputs = call.config, call.problem, call.inputs
        inputs = self.readable(problem, inputs)
        params = self.template(problem, config, inputs)
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
