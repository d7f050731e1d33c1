"""The tensors of GroupNorm's gradients: their checks, their problem, random ones."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from lib_rocm_sd.ops.base import SEED, TrialInputs, reasons
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES
from lib_rocm_sd.ops.group_norm import inputs as group_norm_inputs
from lib_rocm_sd.ops.group_norm.inputs import GroupNormInputs
from lib_rocm_sd.ops.group_norm_backward.problem import (
    GroupNormBackwardProblem,
    test_problems,
)
from lib_rocm_sd.ops.keys import described, tensor_errors
from lib_rocm_sd.ops.lazily import torch


class GroupNormBackwardInputs(NamedTuple):
    """grad and x (N, C, H, W), gamma and beta (C)."""

    grad: torch.Tensor
    x: torch.Tensor
    gamma: torch.Tensor | None
    beta: torch.Tensor | None
    groups: int
    eps: float = 1e-5
    silu: bool = True
    affine: bool = True


def problem_of(inputs: GroupNormBackwardInputs) -> GroupNormBackwardProblem:
    """ValueError, with all shapes, on a caller's mistake."""
    grad, x, gamma, beta, *rest, affine = inputs
    posed = group_norm_inputs.problem_of(GroupNormInputs(x, gamma, beta, *rest))  # type: ignore[arg-type]
    wrong = tensor_errors(grad=grad) or reasons(
        (grad.shape != x.shape, "grad must have the shape of x"),
        (grad.dtype != x.dtype, "grad must have the dtype of x"),
        (grad.device != x.device, f"grad must be on {x.device}"),
    )
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}: {described(grad=grad, x=x, gamma=gamma, beta=beta)}")
    wide = posed.affine
    if gamma is not None and beta is not None:
        wide = DTYPE_NAMES[torch.promote_types(gamma.dtype, beta.dtype)]
    return GroupNormBackwardProblem(
        *(*posed.shape, posed.dtype, posed.channels_last, posed.silu, posed.groups, wide),
        wanted=affine,
    )


def make_inputs(
    problem: GroupNormBackwardProblem, device: torch.device, seed: int
) -> GroupNormBackwardInputs:
    """Random, as the forward pass's, and gradients around zero."""
    x, gamma, beta, groups, eps, silu, _ = group_norm_inputs.make_inputs(problem, device, seed)
    generator = torch.Generator("cpu").manual_seed(seed + 1)
    grad = torch.randn(problem.shape, generator=generator) + 0.1
    made = torch.empty_like(x).copy_(grad)
    return GroupNormBackwardInputs(made, x, gamma, beta, groups, eps, silu, problem.wanted)


def trial_inputs(problem: GroupNormBackwardProblem) -> TrialInputs:
    """An image that is read by halves."""
    p = test_problems(problem)[0]
    return ((f"{p}, misaligned", partial(_misaligned, p)),)


def _misaligned(p: GroupNormBackwardProblem) -> GroupNormBackwardInputs:
    made = make_inputs(p, torch.device("cpu"), SEED)
    room = torch.zeros(made.x.numel() + 1, dtype=made.x.dtype)
    return made._replace(x=room[1:].as_strided(made.x.shape, made.x.stride(), 1).copy_(made.x))
