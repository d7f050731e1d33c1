"""The tensors of LayerNorm's gradients: their checks, their problem, random ones."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from lib_rocm_sd.ops.base import SEED, TrialInputs, reasons
from lib_rocm_sd.ops.keys import described, tensor_errors
from lib_rocm_sd.ops.layer_norm import inputs as layer_norm_inputs
from lib_rocm_sd.ops.layer_norm.inputs import LayerNormInputs
from lib_rocm_sd.ops.layer_norm_backward.problem import (
    LayerNormBackwardProblem,
    test_problems,
)
from lib_rocm_sd.ops.lazily import torch


class LayerNormBackwardInputs(NamedTuple):
    """grad and x (..., C), gamma (C). added and sum_grad, like x, come together: sum_grad is the
    gradient of x + added, which the forward pass gives beside the norm.
    """

    grad: torch.Tensor
    x: torch.Tensor
    gamma: torch.Tensor | None
    eps: float = 1e-5
    added: torch.Tensor | None = None
    sum_grad: torch.Tensor | None = None
    affine: bool = True


def problem_of(inputs: LayerNormBackwardInputs) -> LayerNormBackwardProblem:
    """ValueError, with all shapes, on a caller's mistake."""
    grad, x, gamma, eps, added, sum_grad, affine = inputs
    posed = layer_norm_inputs.problem_of(LayerNormInputs(x, gamma, None, eps, added))
    given = {"grad": grad} if sum_grad is None else {"grad": grad, "sum_grad": sum_grad}
    wrong = tensor_errors(**given) or reasons(
        *((t.shape != x.shape, f"{name} must have the shape of x") for name, t in given.items()),
        *((t.dtype != x.dtype, f"{name} must have the dtype of x") for name, t in given.items()),
        *((t.device != x.device, f"{name} must be on {x.device}") for name, t in given.items()),
        ((added is None) != (sum_grad is None), "added and sum_grad must come together"),
    )
    if wrong:
        every = described(grad=grad, x=x, gamma=gamma, added=added, sum_grad=sum_grad)
        raise ValueError(f"{'; '.join(wrong)}: {every}")
    return LayerNormBackwardProblem(posed.shape, posed.dtype, posed.added, posed.affine, affine)


def make_inputs(
    problem: LayerNormBackwardProblem, device: torch.device, seed: int
) -> LayerNormBackwardInputs:
    """Random, as the forward pass's, and gradients around zero."""
    x, gamma, _, eps, added = layer_norm_inputs.make_inputs(problem, device, seed)
    generator = torch.Generator("cpu").manual_seed(seed + 1)

    def drawn() -> torch.Tensor:
        made = torch.randn(problem.shape, generator=generator) + 0.1
        return made.to(x.dtype).to(device)

    grad, sum_grad = drawn(), drawn() if problem.added else None
    return LayerNormBackwardInputs(grad, x, gamma, eps, added, sum_grad, problem.wanted)


def trial_inputs(problem: LayerNormBackwardProblem) -> TrialInputs:
    """Rows that are read by halves."""
    p, _ = test_problems(problem)
    return ((f"{p}, misaligned", partial(_misaligned, p)),)


def _misaligned(p: LayerNormBackwardProblem) -> LayerNormBackwardInputs:
    made = make_inputs(p, torch.device("cpu"), SEED)
    return made._replace(x=made.x.new_zeros(made.x.numel() + 1)[1:].view(p.shape).copy_(made.x))
