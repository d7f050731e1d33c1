"""Linear layers with a gate: the product by torch, the rest by one pass of ours."""

from __future__ import annotations

from collections.abc import Sequence

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import Call, KernelSpec, Run, Variant, halves_only, one_launch, reasons
from lib_rocm_sd.ops.gradients import gradient_refusals
from lib_rocm_sd.ops.lazily import torch
from lib_rocm_sd.ops.linear import kernel
from lib_rocm_sd.ops.linear.bound import ALIGNED_BYTES, BoundGate, product
from lib_rocm_sd.ops.linear.inputs import LinearInputs
from lib_rocm_sd.ops.linear.kernel import LinearParams
from lib_rocm_sd.ops.linear.problem import LinearProblem

MOST_COLUMNS = 1 << 20


class LibraryLinear(Variant[LinearProblem, LinearInputs]):
    """F.linear by rocBLAS or hipBLASLt, then linear_gate of kernels/linear.hip.

    Before all others: torch's operators launch two kernels after the product, each of which reads
    half of every row. On an H200 they took 5.2 of 34 ms of a step of SDXL.
    """

    name = "torch + rocm_sd"
    ours = True
    preference = 30

    def refusals(self, arch: Arch | None, problem: LinearProblem) -> list[str]:
        if arch is None:
            return ["no supported GPU"]
        p = problem
        return reasons(
            halves_only(p.dtype),
            (not p.gate, "there is no gate (GEGLU), which it is for"),
            (p.all_columns % 8 or not p.all_columns, f"{p.all_columns} columns: no multiple of 8"),
            (p.all_columns > MOST_COLUMNS, f"{p.all_columns} columns"),
            one_launch(kernel.pass_grid(p.rows, p.all_columns) * kernel.SUM_THREADS),
        )

    def input_refusals(self, inputs: LinearInputs) -> list[str]:
        return gradient_refusals(*inputs)

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
        made, out, given = product(inputs), inputs.out, inputs.residual
        if given is not None and (not _good(given) or given.data_ptr() % ALIGNED_BYTES):
            given = given.clone(memory_format=torch.contiguous_format)
        here = out is not None and given is inputs.residual
        y = made.new_empty((problem.rows, problem.all_columns)) if out is None or not here else out
        params = _params(problem, given)
        params.x, params.out = made.data_ptr(), y.data_ptr()
        params.out_stride = params.residual_stride if here else problem.all_columns
        params.residual = 0 if given is None else given.data_ptr()
        call.launcher(*_launch_words(problem), params, made.device)
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
