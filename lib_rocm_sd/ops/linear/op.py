"""Linear layers as the engine, the tests, the benchmark and the tuner see them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from lib_rocm_sd.ops.base import CPU, SEED, Op, TrialInputs
from lib_rocm_sd.ops.lazily import torch
from lib_rocm_sd.ops.linear import inputs as linear_inputs
from lib_rocm_sd.ops.linear import problem as problems
from lib_rocm_sd.ops.linear.formula import reference
from lib_rocm_sd.ops.linear.inputs import LinearInputs, make_inputs
from lib_rocm_sd.ops.linear.ours import MatrixLinear
from lib_rocm_sd.ops.linear.problem import ODD, USUAL, LinearProblem, test_problems
from lib_rocm_sd.ops.linear.torch import LibraryLinear, TorchLinear
from lib_rocm_sd.ops.linear.tunable import TunedLinear

# What the first trial on a card runs beside the test problems: other strides, far rows.


FAR_STRIDE = 1 << 22
"""Halves from row to row, the most that the kernel takes."""
_FAR_ROWS = 260
"""Rows of 8 MiB each, enough to reach beyond 2 GiB."""


def trial_inputs(problem: LinearProblem) -> TrialInputs:
    """Trial inputs for the class of `problem`."""
    small = test_problems(problem)[0]
    trials = [
        (f"{small}, rows with gaps", partial(_spread, small, small.k + 24)),
        (f"{small}, rows at odd addresses", partial(_misaligned, small)),
    ]
    for rows, k in ((77, 72), (2, 2056)):
        tails = replace(small, rows=rows, k=k)
        trials.append((str(tails), partial(make_inputs, tails, CPU, SEED)))
    far = replace(small, rows=_FAR_ROWS)
    trials.append((f"{far}, rows beyond 2 GiB", partial(_spread, far, FAR_STRIDE)))
    return trials


def apart(rows: torch.Tensor, step: int) -> torch.Tensor:
    """`rows` with `step` elements from one to the next, between which nothing is touched."""
    count, width = rows.shape
    whole = rows.new_empty((count - 1) * step + width)
    return whole.as_strided((count, width), (step, 1)).copy_(rows)


def _spread(p: LinearProblem, step: int) -> LinearInputs:
    """x and the residual with gaps between their rows."""
    inputs = make_inputs(p, CPU, SEED)
    residual = inputs.residual
    if residual is not None:
        residual = apart(residual, max(step, p.all_columns + 8))
    out = residual if p.in_place else None
    return inputs._replace(x=apart(inputs.x, step), residual=residual, out=out)


def _misaligned(p: LinearProblem) -> LinearInputs:
    """x one element behind a multiple of 16 bytes, which makes the variant copy it."""
    inputs = make_inputs(p, CPU, SEED)
    whole = torch.zeros((p.rows, p.k + 1), dtype=inputs.x.dtype)
    return inputs._replace(x=whole[:, 1:].copy_(inputs.x))


LINEAR: Op[LinearProblem, LinearInputs] = Op(
    name="linear",
    family="linear",
    title="Linear layer",
    variants=(MatrixLinear(), LibraryLinear(), TorchLinear()),
    problem_of=linear_inputs.problem_of,
    key_of=linear_inputs.key_of,
    reference=reference,
    make_inputs=linear_inputs.make_inputs,
    tolerance=problems.tolerance,
    output_shape=problems.output_shape,
    test_problems=problems.test_problems,
    cases=(*(problem for _, problem in USUAL), *ODD),
    usual=USUAL,
    measured_as=problems.measured_as,
    trial_inputs=trial_inputs,
    measured_only=(TunedLinear(),),
)
OPS = (LINEAR,)
