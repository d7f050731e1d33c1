"""What the first trial on a card runs beside the test problems: strides, masks, tails."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention_backward.inputs import AttentionBackwardInputs, make_inputs
from lib_rocm_sd.ops.base import CPU, SEED, TrialInputs
from lib_rocm_sd.ops.lazily import torch

_TAILS = ((1, 1), (129, 64), (40, 255))


def trial_inputs(problem: AttentionProblem) -> TrialInputs:
    """Trial inputs for the class of `problem`."""
    p = replace(problem, batch=2, heads=2, seq_q=77, seq_k=131)
    found = [
        (str(each), partial(make_inputs, each, CPU, SEED))
        for each in (replace(p, seq_q=q, seq_k=k) for q, k in _TAILS)
    ]
    return (
        *found,
        (f"{p}, views of one tensor", partial(_in_one, p)),
        (f"{p}, rows at odd addresses", partial(_unaligned, p)),
    )


def _in_one(p: AttentionProblem) -> AttentionBackwardInputs:
    """q, k and v as views of one (B, S, 3, H, D)."""
    made = make_inputs(replace(p, seq_k=p.seq_q), CPU, SEED)
    q, k, v = torch.stack(made[:3], 2).unbind(2)
    return made._replace(q=q, k=k, v=v)


def _unaligned(p: AttentionProblem) -> AttentionBackwardInputs:
    """One element behind a multiple of 16 bytes."""
    made = make_inputs(p, CPU, SEED)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros((*tensor.shape[:-1], tensor.shape[-1] + 1), dtype=tensor.dtype)
        return wide[..., 1:].copy_(tensor)

    q, k, v, output, grad = (moved(each) for each in made[:5])
    return AttentionBackwardInputs(q, k, v, output, grad, *made[5:])
