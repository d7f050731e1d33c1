"""The tensors of a LayerNorm: their checks, the problem that they pose, random ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from lib_rocm_sd.ops.base import CPU, SEED, TrialInputs, reasons
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES, DTYPES
from lib_rocm_sd.ops.keys import described, tensor_errors
from lib_rocm_sd.ops.layer_norm.formula import is_float
from lib_rocm_sd.ops.layer_norm.problem import (
    AnyProblem,
    LayerNormProblem,
    test_problems,
)
from lib_rocm_sd.ops.lazily import torch


class LayerNormInputs(NamedTuple):
    """x (..., C), gamma and beta (C), added like x."""

    x: torch.Tensor
    gamma: torch.Tensor | None
    beta: torch.Tensor | None
    eps: float = 1e-5
    added: torch.Tensor | None = None


def problem_of(inputs: LayerNormInputs) -> LayerNormProblem:
    """ValueError, with all shapes, on a caller's mistake."""
    x, gamma, beta, _, added = inputs
    named = {"gamma": gamma, "beta": beta, "added": added}
    given = {name: t for name, t in named.items() if t is not None}
    wrong = tensor_errors(x=x, **given) or _errors(x, given)
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}: {described(x=x, **given)}")
    kinds = [t.dtype for t in (gamma, beta) if t is not None]
    affine = "none"
    if kinds:
        affine = DTYPE_NAMES[torch.promote_types(kinds[0], kinds[-1])]
    return LayerNormProblem(tuple(x.shape), DTYPE_NAMES[x.dtype], added is not None, affine)


def empty(x: torch.Tensor, with_sum: bool) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Results without values: the norm, and the sum beside it."""
    norm = x.new_empty(x.shape)
    return (norm, torch.empty_like(norm)) if with_sum else norm


def _errors(x: torch.Tensor, given: dict[str, torch.Tensor]) -> list[str]:
    if x.ndim == 0:
        return ["x must be (..., C)"]
    channels = x.shape[-1]
    found = reasons((not is_float(x), f"dtype {x.dtype} is not a float type known here"))
    for name, tensor in given.items():
        affine = name != "added"
        found += reasons(
            (affine and tensor.shape != (channels,), f"{name} must have {channels} values"),
            (affine and not is_float(tensor), f"{name} of {tensor.dtype}"),
            (not affine and tensor.shape != x.shape, f"{name} must have the shape of x"),
            (not affine and tensor.dtype != x.dtype, f"{name} must have the dtype of x"),
            (tensor.device != x.device, f"{name} must be on {x.device}"),
        )
    return found


def make_inputs(problem: LayerNormProblem, device: torch.device, seed: int) -> LayerNormInputs:
    """Random, each row around a mean of its own."""
    generator = torch.Generator("cpu").manual_seed(seed)
    dtype, shape = DTYPES[problem.dtype], problem.shape

    def drawn() -> torch.Tensor:
        means = 2 * torch.randn((*shape[:-1], 1), generator=generator)
        return (torch.randn(shape, generator=generator) + means).to(dtype).to(device)

    x, added = drawn(), drawn() if problem.added else None
    gamma = beta = None
    if problem.affine != "none":
        gamma = 1 + 0.3 * torch.randn(problem.channels, generator=generator)
        beta = 0.5 * torch.randn(problem.channels, generator=generator)
        gamma, beta = (t.to(DTYPES[problem.affine]).to(device) for t in (gamma, beta))
    return LayerNormInputs(x, gamma, beta, 1e-5, added)


# What the first trial on a card runs beside the test problems: rows apart, rows read by halves.


def trial_inputs(
    problem: AnyProblem,
    make: Callable[..., Any] = make_inputs,
    small: Callable[..., Any] = test_problems,
) -> TrialInputs:
    """Trial inputs for the class of `problem`: of the first of its `small` ones, by `make`."""
    p, _ = small(problem)
    return (
        (f"{p}, rows of a wider tensor", partial(_apart, make, p, 8, 0)),
        (f"{p}, misaligned", partial(_apart, make, p, 1, 1)),
    )


def _apart(make: Callable[..., Any], p: LayerNormProblem, more: int, first: int) -> Any:
    """x, and added, as C values, from the `first` on, of rows that have `more` of them."""
    made = make(p, CPU, SEED)

    def placed(x: torch.Tensor) -> torch.Tensor:
        wide = x.new_zeros((*p.shape[:-1], p.channels + more))
        return wide[..., first : first + p.channels].copy_(x)

    if made.added is None:
        return made._replace(x=placed(made.x))
    return made._replace(x=placed(made.x), added=placed(made.added))
