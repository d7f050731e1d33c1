"""What the first trial on a card runs beside the test problems: rows apart, rows read by halves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lib_rocm_sd.ops.base import CPU, SEED, TrialInputs
from lib_rocm_sd.ops.layer_norm.inputs import make_inputs
from lib_rocm_sd.ops.layer_norm.problem import AnyProblem, LayerNormProblem, test_problems
from lib_rocm_sd.ops.lazily import torch


def trial_inputs(problem: AnyProblem, make: Callable[..., Any] = make_inputs) -> TrialInputs:
    """Trial inputs for the class of `problem`, drawn by `make`."""
    p, _ = test_problems(problem)
    return (
        (f"{p}, rows of a wider tensor", partial(_apart, make, p, 8, 0)),
        (f"{p}, misaligned", partial(_apart, make, p, 1, 1)),
    )


def _apart(make: Callable[..., Any], p: LayerNormProblem, more: int, first: int) -> Any:
    """x, and added, as C values, from the `first` on, of rows that have `more` of them."""
    made = make(p, CPU, SEED)

    def placed(x: torch.Tensor) -> torch.Tensor:
        wide = x.new_zeros((p.rows, p.channels + more))
        return wide[:, first : first + p.channels].copy_(x)

    if made.added is None:
        return made._replace(x=placed(made.x))
    return made._replace(x=placed(made.x), added=placed(made.added))
