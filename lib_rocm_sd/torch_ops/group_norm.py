"""`rocm_sd::group_norm_silu` and `rocm_sd::group_norm_of`."""

from __future__ import annotations

import torch

from lib_rocm_sd.ops.group_norm.formula import wide_of
from lib_rocm_sd.ops.group_norm.inputs import GroupNormInputs, NormInputs
from lib_rocm_sd.ops.group_norm.op import GROUP_NORM_SILU, NORM
from lib_rocm_sd.ops.group_norm.problem import GroupNormProblem, NormProblem
from lib_rocm_sd.ops.keys import described
from lib_rocm_sd.torch_ops.group_norm_backward import of_silu
from lib_rocm_sd.torch_ops.torch_op import Posed, TorchOp, as_made


def _silu(
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    groups: int,
    eps: float = 1e-5,
    silu: bool = True,
) -> Posed:
    return GROUP_NORM_SILU, GroupNormInputs(x, gamma, beta, groups, eps, silu)


def _like_x(problem: GroupNormProblem, inputs: GroupNormInputs) -> torch.Tensor:
    """In the memory format that the op's variants choose."""
    order = torch.channels_last if problem.channels_last else torch.contiguous_format
    return torch.empty_like(inputs.x, memory_format=order)


def _itself(made: torch.Tensor, inputs: GroupNormInputs, x: torch.Tensor) -> torch.Tensor:
    return made


def _of(
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    groups: int,
    eps: float = 1e-5,
) -> Posed:
    """Pose the norm of x (N, H, W, C), the layout that convolutions take."""
    if x.ndim != 4:
        raise ValueError(f"x must be (N, H, W, C): {described(x=x)}")
    return NORM, NormInputs(x.permute(0, 3, 1, 2), gamma, beta, groups, eps)


def _scale_and_shift(problem: NormProblem, inputs: NormInputs) -> torch.Tensor:
    x = inputs.x
    return x.new_empty((problem.batch, problem.channels, 2), dtype=wide_of(x))


SILU = TorchOp(
    "group_norm_silu",
    "(Tensor x, Tensor? gamma, Tensor? beta, int groups, float eps=1e-5, bool silu=True) -> Tensor",
    _silu,
    _like_x,
    _itself,
    backward=of_silu,
)
OF = TorchOp(
    "group_norm_of",
    "(Tensor x, Tensor? gamma, Tensor? beta, int groups, float eps=1e-5) -> Tensor",
    _of,
    _scale_and_shift,
    as_made,
)


def group_norm_silu_door(inputs: GroupNormInputs) -> torch.Tensor | None:
    """The operator, called with the op's inputs; None where something is added, of which it knows
    nothing.
    """
    if inputs.added is not None:
        return None
    made: torch.Tensor = torch.ops.rocm_sd.group_norm_silu.default(*inputs[:6])
    return made


def group_norm_of_door(inputs: NormInputs) -> torch.Tensor:
    """The operator, called with the op's inputs."""
    x, *others = inputs
    made: torch.Tensor = torch.ops.rocm_sd.group_norm_of.default(x.permute(0, 2, 3, 1), *others)
    return made
