"""`rocm_sd::attention`."""

from __future__ import annotations

import torch

from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionInputs, AttentionProblem, output_shape
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


ATTEND = TorchOp(
    "attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? mask=None, float? scale=None) -> Tensor",
    _posed,
    _empty,
    as_made,
)


def attention_door(inputs: AttentionInputs) -> torch.Tensor:
    """The operator, called with the op's inputs."""
    made: torch.Tensor = torch.ops.rocm_sd.attention.default(*inputs)
    return made
