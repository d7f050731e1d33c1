"""`rocm_sd::attention` and `rocm_sd::attention_backward`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionInputs, AttentionProblem, output_shape
from lib_rocm_sd.ops.attention_backward.op import ATTENTION_BACKWARD
from lib_rocm_sd.ops.attention_backward.problem import AttentionBackwardInputs, Grads
from lib_rocm_sd.torch_ops.torch_op import Posed, TorchOp, as_made


def _posed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Posed:
    return ATTENTION, AttentionInputs(q, k, v, mask, scale)


def _empty(problem: AttentionProblem, inputs: AttentionInputs) -> torch.Tensor:
    return inputs.q.new_empty(output_shape(problem))


def _gradients(
    inputs: AttentionInputs,
    made: tuple[torch.Tensor, ...],
    wanted: Sequence[bool],
    grads: Sequence[torch.Tensor],
) -> list[torch.Tensor | None] | None:
    """By the operator below; None where a mask's gradient is wanted too, or a gradient's, which
    that has not.
    """
    if any(wanted[3:]) or torch.is_grad_enabled():
        return None
    q, k, v, mask, scale = inputs[:5]
    found = torch.ops.rocm_sd.attention_backward.default(q, k, v, *made, *grads, mask, scale)
    return [item if want else None for item, want in zip(found, wanted, strict=False)]


def _backward_posed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    grad: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Posed:
    return ATTENTION_BACKWARD, AttentionBackwardInputs(q, k, v, output, grad, mask, scale)


def _three_empty(problem: AttentionProblem, inputs: AttentionBackwardInputs) -> Grads:
    q, k, v = (t.new_empty(t.shape) for t in inputs[:3])
    return q, k, v


def _three(made: Any, inputs: AttentionBackwardInputs, x: torch.Tensor) -> Grads:
    """Of an input without elements the op gives one tensor."""
    if isinstance(made, torch.Tensor):
        made = [t.new_zeros(t.shape) for t in inputs[:3]]
    q, k, v = (t.contiguous() for t in made)
    return q, k, v


ATTEND = TorchOp(
    "attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? mask=None, float? scale=None) -> Tensor",
    _posed,
    _empty,
    as_made,
    backward=_gradients,
    keeps=True,
)
BACKWARD = TorchOp(
    "attention_backward",
    "(Tensor q, Tensor k, Tensor v, Tensor output, Tensor grad, Tensor? mask=None, "
    "float? scale=None) -> (Tensor, Tensor, Tensor)",
    _backward_posed,
    _three_empty,
    _three,
)


def attention_door(inputs: AttentionInputs) -> torch.Tensor:
    """The operator, called with the op's inputs."""
    made: torch.Tensor = torch.ops.rocm_sd.attention.default(*inputs)
    return made


def attention_backward_door(inputs: AttentionBackwardInputs) -> Grads:
    """The operator, called with the op's inputs."""
    made: Grads = torch.ops.rocm_sd.attention_backward.default(*inputs)
    return made
