"""Linear layers by torch's operators: rocBLAS or hipBLASLt, and what is left to do after them."""

from __future__ import annotations

from collections.abc import Sequence

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import (
    ITEM_BYTES,
    Call,
    KernelSpec,
    Run,
    Variant,
    halves_only,
    one_launch,
    reasons,
)
from lib_rocm_sd.ops.gradients import is_transformed
from lib_rocm_sd.ops.kernel_variant import KernelVariant
from lib_rocm_sd.ops.lazily import F, torch
from lib_rocm_sd.ops.linear import kernel
from lib_rocm_sd.ops.linear.formula import computed
from lib_rocm_sd.ops.linear.inputs import LinearInputs
from lib_rocm_sd.ops.linear.kernel import LinearParams
from lib_rocm_sd.ops.linear.ours import ALIGNED_BYTES, BoundGate, product
from lib_rocm_sd.ops.linear.problem import LinearProblem

# Several weights that are one, for they lie one after another.


def as_one(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Weights (columns, k) as (all columns, k), without a copy; None where they do not lie one
    after another in one memory. Neighbours in memory of two allocations are not one.
    """
    first, rows = weights[0], 0
    begin, k = first.data_ptr(), first.shape[1]
    row_bytes = k * first.element_size()
    for weight in weights:
        if weight.data_ptr() != begin + rows * row_bytes or not weight.is_contiguous():
            return None
        rows += weight.shape[0]
    memory = first.untyped_storage()
    if begin + rows * row_bytes > memory.data_ptr() + memory.nbytes():
        return None
    return first.as_strided((rows, k), (k, 1))


# Linear layers with a gate: the product by torch, the rest by one pass of ours.


MOST_COLUMNS = 1 << 20


class LibraryLinear(KernelVariant[LinearProblem, LinearInputs]):
    """F.linear by rocBLAS or hipBLASLt, then linear_gate of kernels/linear.hip.

    Before all others: torch's operators launch two kernels after the product, each of which reads
    half of every row. On an H200 they took 5.2 of 34 ms of a step of SDXL.
    """

    name = "torch + rocm_sd"
    preference = 30

    def kernel_refusals(self, arch: Arch, problem: LinearProblem) -> list[str]:
        p = problem
        return reasons(
            halves_only(p.dtype),
            (not p.gate, "there is no gate (GEGLU), which it is for"),
            (p.all_columns % 8 or not p.all_columns, f"{p.all_columns} columns: no multiple of 8"),
            (p.all_columns > MOST_COLUMNS, f"{p.all_columns} columns"),
            one_launch(kernel.pass_grid(p.rows, p.all_columns) * kernel.SUM_THREADS),
        )

    def workspace(self, problem: LinearProblem) -> int:
        """The product."""
        return 4 * problem.rows * problem.all_columns

    def specs(self, arch: Arch, problem: LinearProblem, config: None) -> Sequence[KernelSpec]:
        return (kernel.gate_spec(problem.dtype),)

    def bound(self, call: Call[LinearProblem, LinearInputs]) -> Run:
        """Where the residual has dense rows and the launcher can prepare a launch."""
        problem, inputs = call.problem, call.inputs
        prepare = getattr(call.launch, "prepare", None)
        residual = inputs.residual
        if prepare is None or (residual is not None and not _good(residual)):
            return self.run
        first = _params(problem, residual)
        device, words = inputs.x.device, _launch_words(problem)
        return BoundGate(problem, first, lambda params: prepare(*words, params, device), self.run)

    def run(self, call: Call[LinearProblem, LinearInputs]) -> torch.Tensor:
        problem, inputs = call.problem, call.inputs
        sums, out, residual = product(inputs), inputs.out, inputs.residual
        if residual is not None and (not _good(residual) or residual.data_ptr() % ALIGNED_BYTES):
            residual = residual.clone(memory_format=torch.contiguous_format)
        here = out is not None and residual is inputs.residual
        y = sums.new_empty((problem.rows, problem.all_columns)) if out is None or not here else out
        params = _params(problem, residual)
        params.x, params.out = sums.data_ptr(), y.data_ptr()
        params.out_stride = params.residual_stride if here else problem.all_columns
        params.residual = 0 if residual is None else residual.data_ptr()
        call.launcher(*_launch_words(problem), params, sums.device)
        return y if here or out is None else out.copy_(y)


def _params(p: LinearProblem, residual: torch.Tensor | None) -> LinearParams:
    """The argument, but for addresses."""
    step = p.all_columns if residual is None or p.rows < 2 else int(residual.stride(0))
    return LinearParams(
        rows=p.rows,
        columns=p.all_columns,
        x_stride=2 * p.all_columns,
        residual_stride=step,
        out_stride=step if p.in_place else p.all_columns,
    )


def _launch_words(p: LinearProblem) -> tuple[KernelSpec, int, int]:
    grid = kernel.pass_grid(p.rows, p.all_columns)
    return kernel.gate_spec(p.dtype), grid, kernel.SUM_THREADS


def _good(residual: torch.Tensor) -> bool:
    """Its rows are dense, and begin at multiples of 16 bytes if the first does."""
    step = residual.stride(0) if residual.shape[0] > 1 else 0
    return residual.stride(1) == 1 and step % 8 == 0 and step < 1 << 32


class TorchLinear(Variant[LinearProblem, LinearInputs]):
    """F.linear for each weight, then the host's own operators, which round between them.

    First under Auto: on the one card where both were measured, of another vendor, its products of
    many rows take a half to a quarter of ours' time. Gate and residual are launches of their own,
    but for a residual that a product without a bias is added to in place. Performance measures
    both. Halves on the CPU are computed in float32, for an older torch has no product of them.
    """

    name = "torch"
    preference = 20

    def workspace(self, problem: LinearProblem) -> int:
        """What is made before the output."""
        p = problem
        added = p.residual and not (
            p.in_place and not p.bias and len(p.columns) == 1 and not p.gate
        )
        copies = p.gate * 3 + (len(p.columns) > 1) + added
        return copies * p.rows * p.all_columns * ITEM_BYTES[p.dtype]

    def bound(self, call: Call[LinearProblem, LinearInputs]) -> Run:
        """Several weights write side by side, where autograd does not follow."""
        on_cpu = call.inputs.x.device.type == "cpu"
        if len(call.problem.columns) == 1 or on_cpu or torch.is_grad_enabled():
            return self.run
        return _side_by_side

    def run(self, call: Call[LinearProblem, LinearInputs]) -> torch.Tensor:
        inputs = call.inputs
        x = inputs.x
        if x.device.type == "cpu":
            wide = torch.promote_types(x.dtype, torch.float32)
            y = computed(inputs, wide).to(x.dtype)
            return y if inputs.out is None else inputs.out.copy_(y)
        if _adds_only(inputs) and inputs.out is not None:
            return inputs.out.addmm_(x, inputs.weight.t())
        if inputs.weight_1 is None:
            y = F.linear(x, inputs.weight, inputs.bias)
        elif torch.is_grad_enabled() or is_transformed():
            y = torch.cat([F.linear(x, weight, bias) for weight, bias in inputs.layers], 1)
        else:
            return _side_by_side(call)
        return finished(y, inputs)


def _side_by_side(call: Call[LinearProblem, LinearInputs]) -> torch.Tensor:
    """Without a copy of what several weights make; by one product where they are one."""
    problem, inputs = call.problem, call.inputs
    layers = inputs.layers
    plain = all(bias is None for _, bias in layers)
    whole = as_one([weight for weight, _ in layers]) if plain else None
    if whole is not None:
        return finished(torch.mm(inputs.x, whole.t()), inputs)
    y = inputs.x.new_empty((problem.rows, problem.all_columns))
    parts = y.split_with_sizes(problem.columns, 1)
    for (weight, bias), part in zip(layers, parts, strict=True):
        if bias is None:
            torch.mm(inputs.x, weight.t(), out=part)
        else:
            torch.addmm(bias, inputs.x, weight.t(), out=part)
    return finished(y, inputs)


def _adds_only(inputs: LinearInputs) -> bool:
    """Whether a library's product adds to what is there and nothing is left to do: with a bias, or
    a tensor that is not written to, it would be two launches.
    """
    return inputs.bias is None and inputs.weight_1 is None and not inputs.gate


def finished(y: torch.Tensor, inputs: LinearInputs) -> torch.Tensor:
    """The gate and the residual, after the products."""
    if inputs.gate:
        value, gate = y.chunk(2, 1)
        y = value * F.gelu(gate)
    if inputs.residual is None:
        return y
    return y + inputs.residual if inputs.out is None else inputs.out.add_(y)
