"""Linear layers by torch's operators: rocBLAS or hipBLASLt, and what is left to do after them."""

from __future__ import annotations

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import ITEM_BYTES, Call, Run, Variant
from lib_rocm_sd.ops.gradients import is_transformed
from lib_rocm_sd.ops.lazily import F, torch
from lib_rocm_sd.ops.linear.formula import computed
from lib_rocm_sd.ops.linear.inputs import LinearInputs
from lib_rocm_sd.ops.linear.joint import as_one
from lib_rocm_sd.ops.linear.problem import LinearProblem


class TorchLinear(Variant[LinearProblem, LinearInputs]):
    """F.linear for each weight, then the host's own operators, which round between them.

    First under Auto: on the one card where both were measured, of another vendor, its products of
    many rows take a half to a quarter of ours' time. Gate and residual are launches of their own,
    but for a residual that a product without a bias is added to in place. Performance measures
    both. Halves on the CPU are computed in float32, for an older torch has no product of them.
    """

    name = "torch"
    preference = 20

    def refusals(self, arch: Arch | None, problem: LinearProblem) -> list[str]:
        return []

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
