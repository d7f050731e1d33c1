"""`rocm_sd::group_norm_silu_backward`: what autograd calls for the gradients of group_norm_silu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lib_rocm_sd.ops.dtypes import DTYPES
from lib_rocm_sd.ops.group_norm.inputs import GroupNormInputs
from lib_rocm_sd.ops.group_norm_backward.inputs import GroupNormBackwardInputs
from lib_rocm_sd.ops.group_norm_backward.op import GROUP_NORM_BACKWARD
from lib_rocm_sd.ops.group_norm_backward.problem import GroupNormBackwardProblem
from lib_rocm_sd.torch_ops.layer_norm_backward import Three, chosen, three
from lib_rocm_sd.torch_ops.torch_op import Posed, TorchOp


def _posed(
    grad: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    groups: int,
    eps: float = 1e-5,
    silu: bool = True,
    affine: bool = True,
) -> Posed:
    inputs = GroupNormBackwardInputs(grad, x, gamma, beta, groups, eps, silu, affine)
    return GROUP_NORM_BACKWARD, inputs


def _empty(problem: GroupNormBackwardProblem, inputs: GroupNormBackwardInputs) -> Three:
    """The image in the memory format that the op's variants choose."""
    order = torch.channels_last if problem.channels_last else torch.contiguous_format
    channels, dtype = problem.channels if problem.wanted else 0, DTYPES[problem.affine_dtype]
    of_gamma, of_beta = (inputs.x.new_empty(channels, dtype=dtype) for _ in range(2))
    return torch.empty_like(inputs.x, memory_format=order), of_gamma, of_beta


def _three(made: Any, inputs: GroupNormBackwardInputs, grad: torch.Tensor) -> Three:
    given = [t.dtype for t in (inputs.gamma, inputs.beta) if t is not None]
    dtype = torch.promote_types(given[0], given[-1]) if given else inputs.x.dtype
    return three(made, inputs.x, dtype, inputs.x.shape[1] if inputs.affine else 0)


SILU = TorchOp(
    "group_norm_silu_backward",
    "(Tensor grad, Tensor x, Tensor? gamma, Tensor? beta, int groups, float eps=1e-5, "
    "bool silu=True, bool affine=True) -> (Tensor, Tensor, Tensor)",
    _posed,
    _empty,
    _three,
)


def group_norm_backward_door(inputs: GroupNormBackwardInputs) -> Any:
    """The operator, called with the op's inputs."""
    made = torch.ops.rocm_sd.group_norm_silu_backward.default(*inputs)
    return made if inputs.affine else (made[0], None, None)


def of_silu(
    inputs: GroupNormInputs,
    results: tuple[torch.Tensor, ...],
    wanted: Sequence[bool],
    grads: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Gradients of the arguments of group_norm_silu."""
    x, gamma, beta, *rest = inputs[:6]
    made = torch.ops.rocm_sd.group_norm_silu_backward.default(
        *(grads[0], x, gamma, beta, *rest, any(wanted[1:3]))
    )
    return chosen(made, (x, gamma, beta), wanted)
