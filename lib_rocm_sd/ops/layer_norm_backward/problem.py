"""The gradients of LayerNorm without a way to compute them: problems, their checks, cases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from lib_rocm_sd.ops.base import TrialInputs, reasons
from lib_rocm_sd.ops.dtypes import DTYPES
from lib_rocm_sd.ops.keys import described, tensor_errors
from lib_rocm_sd.ops.layer_norm import problem as forward
from lib_rocm_sd.ops.layer_norm.problem import LayerNormInputs, LayerNormProblem

SEED = 2654435769
"""The self-tests' own."""


@dataclass(frozen=True)
class LayerNormBackwardProblem(LayerNormProblem):
    """`wanted`: whether gradients of gamma and beta are, and not that of x alone."""

    wanted: bool = True

    def __str__(self) -> str:
        return f"{super().__str__()}{', all gradients' if self.wanted else ''}"

    @property
    def affine_dtype(self) -> torch.dtype:
        """Dtype of the gradients of gamma and beta: gamma's, or x's where there is none."""
        return DTYPES[self.dtype if self.affine == "none" else self.affine]


class LayerNormBackwardInputs(NamedTuple):
    """grad and x (..., C), gamma (C). added and sum_grad, like x, come together: sum_grad is the
    gradient of x + added, which the forward pass gives beside the norm.
    """

    grad: torch.Tensor
    x: torch.Tensor
    gamma: torch.Tensor | None
    eps: float
    added: torch.Tensor | None = None
    sum_grad: torch.Tensor | None = None
    affine: bool = True


def problem_of(inputs: LayerNormBackwardInputs) -> LayerNormBackwardProblem:
    """ValueError, with all shapes, on a caller's mistake."""
    grad, x, gamma, eps, added, sum_grad, affine = inputs
    posed = forward.problem_of(LayerNormInputs(x, gamma, None, eps, added))
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
    x, gamma, _, eps, added = forward.make_inputs(problem, device, seed)
    generator = torch.Generator("cpu").manual_seed(seed + 1)

    def drawn() -> torch.Tensor:
        made = torch.randn(problem.shape, generator=generator) + 0.1
        return made.to(x.dtype).to(device)

    grad, sum_grad = drawn(), drawn() if problem.added else None
    return LayerNormBackwardInputs(grad, x, gamma, eps, added, sum_grad, problem.wanted)


def tolerance(problem: LayerNormBackwardProblem) -> float:
    """Largest max |out - reference| / max |reference|: a few units in the last place, of the
    coarser dtype of the gradients.
    """
    dtypes = {problem.dtype, problem.affine if problem.affine != "none" else problem.dtype}
    return max(forward.tolerance(replace(problem, dtype=dtype)) for dtype in dtypes)


def test_problems(problem: LayerNormBackwardProblem) -> tuple[LayerNormBackwardProblem, ...]:
    """Rows of the same length: more than work-groups make evenly, and one."""
    return tuple(replace(problem, shape=(rows, problem.channels)) for rows in (77, 1))


test_problems.__test__ = False  # type: ignore[attr-defined]  # not a test for pytest


def trial_inputs(problem: LayerNormBackwardProblem) -> TrialInputs:
    """Rows that are read by halves."""
    p, _ = test_problems(problem)
    return ((f"{p}, misaligned", partial(_misaligned, p)),)


def _misaligned(p: LayerNormBackwardProblem) -> LayerNormBackwardInputs:
    made = make_inputs(p, torch.device("cpu"), SEED)
    return made._replace(x=made.x.new_zeros(made.x.numel() + 1)[1:].view(p.shape).copy_(made.x))


_LARGE = LayerNormBackwardProblem((2, 4096, 320))
_FROZEN = replace(_LARGE, added=True, wanted=False)
USUAL = (
    ("SD1.5 512x512, 64x64", _LARGE),
    ("SD1.5 512x512, 64x64, added, frozen", _FROZEN),
    ("SD1.5 512x512, 16x16", replace(_LARGE, shape=(2, 256, 1280))),
    ("SD1.5 512x512, 16x16, added, frozen", replace(_FROZEN, shape=(2, 256, 1280))),
    ("SDXL 1024x1024, 64x64", replace(_LARGE, shape=(2, 4096, 640))),
    ("SDXL 1024x1024, 64x64, added, frozen", replace(_FROZEN, shape=(2, 4096, 640))),
)
"""What training Stable Diffusion meets, by name. Frozen: the norm's own parameters are not trained,
as with a LoRA."""

ODD = (
    LayerNormBackwardProblem((1, 8)),
    LayerNormBackwardProblem((3, 5, 7), "float16", True, "float32"),
    LayerNormBackwardProblem((37, 328), "bfloat16", True, "bfloat16", False),
    LayerNormBackwardProblem((2, 3, 3, 40), "float16", False, "none"),
    LayerNormBackwardProblem((69, 1280), "bfloat16", False, "float32"),
    LayerNormBackwardProblem((3, 6155), "float16", True, "float16"),
)
"""Small shapes at which indexing errors show."""
