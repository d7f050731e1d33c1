"""What the first trial on a card runs beside the test problems: rows apart, rows read by halves."""

from __future__ import annotations

from functools import partial

import torch

from lib_rocm_sd.ops.base import TrialInputs
from lib_rocm_sd.ops.layer_norm.problem import (
    LayerNormInputs,
    LayerNormProblem,
    make_inputs,
    test_problems,
)

CPU = torch.device("cpu")
SEED = 2654435769
"""The self-tests' own, so that inputs differ by where they lie alone."""


def trial_inputs(problem: LayerNormProblem) -> TrialInputs:
    """Of the class of `problem`."""
    p, _ = test_problems(problem)
    return (
        (f"{p}, rows of a wider tensor", partial(_apart, p, 8, 0)),
        (f"{p}, misaligned", partial(_apart, p, 1, 1)),
    )


def _apart(p: LayerNormProblem, more: int, first: int) -> LayerNormInputs:
    """x and added as C values, from the `first` on, of rows that have `more` of them."""
    made = make_inputs(p, CPU, SEED)

    def placed(x: torch.Tensor) -> torch.Tensor:
        wide = x.new_zeros((p.rows, p.channels + more))
        return wide[:, first : first + p.channels].copy_(x)

    added = None if made.added is None else placed(made.added)
    return made._replace(x=placed(made.x), added=added)
