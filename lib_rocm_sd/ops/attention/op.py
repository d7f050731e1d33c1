"""Attention, also for a backward pass, as the engine, tests, benchmark and tuner see it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from lib_rocm_sd.ops.attention import inputs as attention_inputs
from lib_rocm_sd.ops.attention import problem as problems
from lib_rocm_sd.ops.attention import with_lse
from lib_rocm_sd.ops.attention.formula import reference
from lib_rocm_sd.ops.attention.inputs import AttentionInputs, make_inputs
from lib_rocm_sd.ops.attention.kernel import UNBIASED
from lib_rocm_sd.ops.attention.libraries import BACKENDS, LIBRARIES, SdpaBackend, TritonAttention
from lib_rocm_sd.ops.attention.ours import MatrixAttention, ScoresAttention
from lib_rocm_sd.ops.attention.problem import CASES, ODD, USUAL, AttentionProblem
from lib_rocm_sd.ops.attention.torch import SdpaAttention, SlicedAttention
from lib_rocm_sd.ops.base import CPU, ITEM_BYTES, SEED, Op, TrialInputs
from lib_rocm_sd.ops.lazily import torch

# What the first trial on a card runs beside the test problems: strides, masks, tails, far ends.


FAR_BYTES = (2 << 30) + 4096
"""Between batch items: what an offset of 32 bits with a sign cannot say."""
_TAILS = ((1, 3, 1, 1), (3, 1, 129, 64), (2, 2, 200, 255))
"""Batch, heads, queries, keys."""
_MASKS = ("one row for all queries", "one per head", "keys apart")


def trial_inputs(problem: AttentionProblem) -> TrialInputs:
    """Trial inputs for the class of `problem`. With a mask, they cover each kind of its strides."""
    p = replace(problem, batch=2, heads=2, seq_q=77, seq_k=131)
    trials = []
    for batch, heads, seq_q, seq_k in _TAILS:
        tail = replace(p, batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k)
        trials.append((str(tail), partial(make_inputs, tail, CPU, SEED)))
    if problem.head_dim > 256:  # rows of scores as long as they will be
        rows = replace(p, batch=1, heads=1, seq_q=3, seq_k=problem.seq_k)
        trials.append((str(rows), partial(make_inputs, rows, CPU, SEED)))
    trials.append((f"{p}, views of one tensor", partial(_in_one, p)))
    trials.append((f"{p}, rows at odd addresses", partial(_unaligned, p)))
    if p.mask not in UNBIASED:
        trials += [(f"{p}, {name}", partial(_masked, p, name)) for name in _MASKS]
    trials.append((f"{p}, 2 GiB apart", partial(_far, p)))
    return trials


def _in_one(p: AttentionProblem) -> AttentionInputs:
    """q, k and v as views of one (B, S, 3, H, D)."""
    inputs = make_inputs(replace(p, seq_k=p.seq_q), CPU, SEED)
    q, k, v = torch.stack(inputs[:3], 2).unbind(2)
    return AttentionInputs(q, k, v, inputs.mask)


def _unaligned(p: AttentionProblem) -> AttentionInputs:
    """One element behind a multiple of 16 bytes, with gaps between heads."""
    inputs = make_inputs(p, CPU, SEED)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros((*tensor.shape[:3], p.head_dim + 1), dtype=tensor.dtype)
        view = wide[..., 1:]
        view.copy_(tensor)
        return view

    return AttentionInputs(moved(inputs.q), moved(inputs.k), moved(inputs.v), inputs.mask)


def _masked(p: AttentionProblem, kind: str) -> AttentionInputs:
    inputs = make_inputs(p, CPU, SEED)
    mask = inputs.mask
    assert mask is not None
    if kind == _MASKS[0]:
        mask = mask[:1, :, :1].clone()
    elif kind == _MASKS[1]:
        mask = torch.cat([mask.roll(head, 2) for head in range(p.heads)], 1)
    else:
        mask = mask.transpose(2, 3).contiguous().transpose(2, 3)
    return inputs._replace(mask=mask)


def _far(p: AttentionProblem) -> AttentionInputs:
    """The second batch item lies beyond 2 GiB; of the memory between nothing is touched."""
    inputs = make_inputs(p, CPU, SEED)
    step = FAR_BYTES // ITEM_BYTES[p.dtype]
    rows = p.heads * p.head_dim
    sizes = [t.shape[1] * rows for t in inputs[:3]]
    whole = torch.empty(step + sum(sizes), dtype=inputs.q.dtype)
    views, first = [], 0
    for tensor, size in zip(inputs[:3], sizes, strict=True):
        strides = (step, rows, p.head_dim, 1)
        view = whole.as_strided(tensor.shape, strides, first)
        view.copy_(tensor)
        views.append(view)
        first += size
    q, k, v = views
    return AttentionInputs(q, k, v, inputs.mask)


ATTENTION: Op[AttentionProblem, AttentionInputs] = Op(
    name="attention",
    family="attention",
    title="Attention",
    variants=(MatrixAttention(), ScoresAttention(), SdpaAttention(), SlicedAttention()),
    problem_of=attention_inputs.problem_of,
    key_of=attention_inputs.key_of,
    reference=reference,
    make_inputs=attention_inputs.make_inputs,
    tolerance=problems.tolerance,
    output_shape=problems.output_shape,
    test_problems=problems.test_problems,
    cases=(*(case.problem for case in CASES), *ODD),
    usual=USUAL,
    measured_as=problems.measured_as,
    trial_inputs=trial_inputs,
    measured_only=(*map(SdpaBackend, BACKENDS), *LIBRARIES, TritonAttention()),
)
ATTENTION_AND_LSE: Op[AttentionProblem, AttentionInputs] = Op(
    name="attention and lse",
    family="attention",
    title="Attention, to be followed by its gradients",
    variants=with_lse.VARIANTS,
    problem_of=attention_inputs.problem_of,
    key_of=attention_inputs.key_of,
    reference=with_lse.reference,
    make_inputs=attention_inputs.make_inputs,
    tolerance=problems.tolerance,
    output_shape=problems.output_shape,
    test_problems=problems.test_problems,
    cases=ATTENTION.cases,
    usual=USUAL,
    results=with_lse.empty,
    measured_as=problems.measured_as,
    trial_inputs=trial_inputs,
)
OPS = (ATTENTION, ATTENTION_AND_LSE)
