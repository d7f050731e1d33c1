"""The backward of attention as the engine, the tests and the benchmark see it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from lib_rocm_sd.ops.attention import problem as forward
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention_backward import inputs as attention_backward_inputs
from lib_rocm_sd.ops.attention_backward import problem as problems
from lib_rocm_sd.ops.attention_backward.formula import reference
from lib_rocm_sd.ops.attention_backward.inputs import AttentionBackwardInputs, make_inputs
from lib_rocm_sd.ops.attention_backward.ours import MatrixBackward
from lib_rocm_sd.ops.attention_backward.torch import (
    FormulaBackward,
    SdpaBackward,
    SlicedBackward,
)
from lib_rocm_sd.ops.base import CPU, SEED, Op, TrialInputs
from lib_rocm_sd.ops.keys import key_of
from lib_rocm_sd.ops.lazily import torch

# What the first trial on a card runs beside the test problems: strides, masks, tails.


_TAILS = ((1, 3, 1, 1), (3, 1, 129, 64), (2, 2, 40, 255))
"""Batch, heads, queries, keys."""


def trial_inputs(problem: AttentionProblem) -> TrialInputs:
    """Trial inputs for the class of `problem`."""
    p = replace(problem, batch=2, heads=2, seq_q=77, seq_k=131)
    trials = []
    for batch, heads, seq_q, seq_k in _TAILS:
        tail = replace(p, batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k)
        trials.append((str(tail), partial(make_inputs, tail, CPU, SEED)))
    return (
        *trials,
        (f"{p}, views of one tensor", partial(_in_one, p)),
        (f"{p}, rows at odd addresses", partial(_unaligned, p)),
    )


def _in_one(p: AttentionProblem) -> AttentionBackwardInputs:
    """q, k and v as views of one (B, S, 3, H, D)."""
    inputs = make_inputs(replace(p, seq_k=p.seq_q), CPU, SEED)
    q, k, v = torch.stack(inputs[:3], 2).unbind(2)
    return inputs._replace(q=q, k=k, v=v)


def _unaligned(p: AttentionProblem) -> AttentionBackwardInputs:
    """One element behind a multiple of 16 bytes."""
    inputs = make_inputs(p, CPU, SEED)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros((*tensor.shape[:-1], tensor.shape[-1] + 1), dtype=tensor.dtype)
        return wide[..., 1:].copy_(tensor)

    q, k, v, output, grad = (moved(each) for each in inputs[:5])
    return AttentionBackwardInputs(q, k, v, output, grad, *inputs[5:])


ATTENTION_BACKWARD: Op[AttentionProblem, AttentionBackwardInputs] = Op(
    name="attention backward",
    family="attention_backward",
    title="Attention, backward",
    variants=(MatrixBackward(), FormulaBackward(), SdpaBackward(), SlicedBackward()),
    problem_of=attention_backward_inputs.problem_of,
    key_of=key_of,
    reference=reference,
    make_inputs=attention_backward_inputs.make_inputs,
    tolerance=problems.tolerance,
    output_shape=lambda p: (p.batch, p.seq_q, p.heads, p.head_dim),
    test_problems=problems.test_problems,
    cases=(*(problem for _, problem in problems.USUAL), *problems.ODD),
    usual=problems.USUAL,
    results=lambda problem, inputs: tuple(t.new_empty(t.shape) for t in inputs[:3]),
    measured_as=forward.measured_as,
    trial_inputs=trial_inputs,
)
OPS = (ATTENTION_BACKWARD,)
