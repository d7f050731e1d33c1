"""`rocm_sd::attention`, `rocm_sd::attention_and_lse` and `rocm_sd::attention_backward`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from lib_rocm_sd.device import identify
from lib_rocm_sd.followed import wanted
from lib_rocm_sd.ops.attention import with_lse
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION, ATTENTION_AND_LSE
from lib_rocm_sd.ops.attention.problem import AttentionProblem, output_shape
from lib_rocm_sd.ops.attention_backward import kernel
from lib_rocm_sd.ops.attention_backward.inputs import AttentionBackwardInputs, Grads
from lib_rocm_sd.ops.attention_backward.op import ATTENTION_BACKWARD
from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES
from lib_rocm_sd.torch_ops.torch_op import Posed, TorchOp, as_made


def _posed(
    op: Op[AttentionProblem, AttentionInputs],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Posed:
    return op, AttentionInputs(q, k, v, mask, scale)


def _empty(problem: AttentionProblem, inputs: AttentionInputs) -> torch.Tensor:
    return inputs.q.new_empty(output_shape(problem))


def _gradients(
    inputs: AttentionInputs,
    made: tuple[torch.Tensor, ...],
    wanted: Sequence[bool],
    grads: Sequence[torch.Tensor],
) -> list[torch.Tensor | None] | None:
    """By the operator below; None where a mask's gradient is wanted too, or a gradient's, which
    that has not, or no log-sum-exp was kept.
    """
    output, *lse = made
    if not lse or any(wanted[3:]) or torch.is_grad_enabled():
        return None
    q, k, v, mask, scale = inputs[:5]
    backward = torch.ops.rocm_sd.attention_backward.default
    found = backward(q, k, v, output, *grads, *lse, mask, scale)
    return [item if want else None for item, want in zip(found, wanted, strict=False)]


def _followed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...] | None:
    """With the log-sum-exp, where kernels of ours may make the gradients; torch's would not read
    it.
    """
    known = isinstance(q, torch.Tensor) and q.ndim == 4 and identify(q.device).arch is not None
    if not known or DTYPE_NAMES.get(q.dtype) not in kernel.DTYPES:
        return None
    if kernel.head_dim_refusals(q.shape[3]) or wanted((mask,)):
        return None
    made: tuple[torch.Tensor, ...] = torch.ops.rocm_sd.attention_and_lse.default(
        *(q, k, v, mask, scale)
    )
    return made


def _both_empty(problem: AttentionProblem, inputs: AttentionInputs) -> with_lse.Both:
    q = inputs.q
    lse = q.new_empty(with_lse.lse_shape(problem), dtype=with_lse.wide(q.dtype))
    return q.new_empty(output_shape(problem)), lse


def _both(made: Any, inputs: AttentionInputs, x: torch.Tensor) -> with_lse.Both:
    output, lse = with_lse.given(made, ATTENTION_AND_LSE.problem_of(inputs), inputs.q)
    return output.contiguous(), lse.contiguous()


def _backward_posed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    grad: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Posed:
    return ATTENTION_BACKWARD, AttentionBackwardInputs(q, k, v, output, grad, lse, mask, scale)


def _three_empty(problem: AttentionProblem, inputs: AttentionBackwardInputs) -> Grads:
    q, k, v = (t.new_empty(t.shape) for t in inputs[:3])
    return q, k, v


def _three(made: Any, inputs: AttentionBackwardInputs, x: torch.Tensor) -> Grads:
    """Three gradients; for an input without elements the op gives one tensor."""
    if isinstance(made, torch.Tensor):
        made = [t.new_zeros(t.shape) for t in inputs[:3]]
    q, k, v = (t.contiguous() for t in made)
    return q, k, v


ATTEND = TorchOp(
    "attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? mask=None, float? scale=None) -> Tensor",
    partial(_posed, ATTENTION),
    _empty,
    as_made,
    backward=_gradients,
    keeps=True,
    followed=_followed,
)
AND_LSE = TorchOp(
    "attention_and_lse",
    "(Tensor q, Tensor k, Tensor v, Tensor? mask=None, float? scale=None) -> (Tensor, Tensor)",
    partial(_posed, ATTENTION_AND_LSE),
    _both_empty,
    _both,
)
BACKWARD = TorchOp(
    "attention_backward",
    "(Tensor q, Tensor k, Tensor v, Tensor output, Tensor grad, Tensor lse, Tensor? mask=None, "
    "float? scale=None) -> (Tensor, Tensor, Tensor)",
    _backward_posed,
    _three_empty,
    _three,
)


def attention_door(inputs: AttentionInputs) -> torch.Tensor:
    """The operator, called with the op's inputs."""
    made: torch.Tensor = torch.ops.rocm_sd.attention.default(*inputs)
    return made


def attention_and_lse_door(inputs: AttentionInputs) -> with_lse.Both:
    """The operator, called with the op's inputs."""
    made: with_lse.Both = torch.ops.rocm_sd.attention_and_lse.default(*inputs)
    return made


def attention_backward_door(inputs: AttentionBackwardInputs) -> Grads:
    """The operator, called with the op's inputs."""
    made: Grads = torch.ops.rocm_sd.attention_backward.default(*inputs)
    return made
