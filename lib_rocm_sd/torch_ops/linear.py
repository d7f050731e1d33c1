"""`rocm_sd::linear`."""

from __future__ import annotations

import torch

from lib_rocm_sd.ops.base import reasons
from lib_rocm_sd.ops.keys import described
from lib_rocm_sd.ops.linear.call import inputs_of
from lib_rocm_sd.ops.linear.inputs import LinearInputs
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.problem import LinearProblem, output_shape
from lib_rocm_sd.torch_ops.torch_op import Posed, TorchOp


def _posed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gate: bool = False,
    weight_1: torch.Tensor | None = None,
    bias_1: torch.Tensor | None = None,
    weight_2: torch.Tensor | None = None,
    bias_2: torch.Tensor | None = None,
) -> Posed:
    """Weights and biases one by one, for a list of tensors costs each call more."""
    lacking = reasons(
        (bias_1 is not None and weight_1 is None, "bias_1 without weight_1"),
        (bias_2 is not None and weight_2 is None, "bias_2 without weight_2"),
        (weight_2 is not None and weight_1 is None, "weight_2 without weight_1"),
    )
    if lacking:
        given = dict(x=x, weight=weight, weight_1=weight_1, bias_1=bias_1)
        told = described(**given, weight_2=weight_2, bias_2=bias_2)
        raise ValueError(f"{'; '.join(lacking)}: {told}")
    layers = [(weight, bias)]
    layers += [(w, b) for w, b in ((weight_1, bias_1), (weight_2, bias_2)) if w is not None]
    weights, biases = zip(*layers, strict=True)
    return LINEAR, inputs_of(x, weights, biases, residual, gate, None)


def _empty(problem: LinearProblem, inputs: LinearInputs) -> torch.Tensor:
    return inputs.x.new_empty(output_shape(problem))


def _unflattened(made: torch.Tensor, inputs: LinearInputs, x: torch.Tensor) -> torch.Tensor:
    """(rows, columns) as x has its rows."""
    return made.contiguous().view(*x.shape[:-1], made.shape[1])


ROWS = TorchOp(
    "linear",
    "(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None, bool gate=False, "
    "Tensor? weight_1=None, Tensor? bias_1=None, Tensor? weight_2=None, Tensor? bias_2=None) "
    "-> Tensor",
    _posed,
    _empty,
    _unflattened,
)


def linear_door(inputs: LinearInputs) -> torch.Tensor:
    """The operator, called with the op's inputs: several times for more weights than it has names
    for. What is to be written over is written after.
    """
    x, weight, bias, residual, out, *others, gate, more = inputs
    operator = torch.ops.rocm_sd.linear.default
    if not more:
        made: torch.Tensor = operator(x, weight, bias, residual, gate, *others)
    else:
        flat = (weight, bias, *others, *more)
        parts = [operator(x, w, b) for w, b in zip(flat[::2], flat[1::2], strict=True)]
        made = torch.cat(parts, 1)
        made = made if residual is None else made + residual
    return made if out is None else out.copy_(made)
