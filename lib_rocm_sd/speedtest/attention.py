"""Attention: ours, the host's, and what else its users pick; each verified, then timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from lib_rocm_sd import functional
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.measure import input_sets
from lib_rocm_sd.lab.methods import ALLOWANCE, METHODS, exact
from lib_rocm_sd.ops.attention.inputs import AttentionInputs, problem_of
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention.torch import SdpaAttention
from lib_rocm_sd.ops.base import Call, Variant
from lib_rocm_sd.speedtest.guard import FAILED, Guard, Peak, spread, why
from lib_rocm_sd.speedtest.job import Job, Shares
from lib_rocm_sd.speedtest.presets import attention_cases
from lib_rocm_sd.speedtest.result import SpeedRow
from lib_rocm_sd.speedtest.side import Attention, Cancelled

SDP = "SDP"
CHECKED_QUERIES = 128
"""Queries compared with float64 in a problem that has more."""
SLICE_FLOPS = {"cuda": 4e12, "cpu": 4e9}
"""A call with more is made of slices of queries, the same for every method."""
MOST_FLOPS = {"cuda": 5e14, "cpu": 1e12}
MOST_VALUES = {"cuda": 1 << 28, "cpu": 1 << 24}
"""What a single call may ask for, and the most values that its queries may have."""


@dataclass(frozen=True)
class _Case:
    """A problem with its inputs, the checked queries' numbers and exact results."""

    problem: AttentionProblem
    sets: list[AttentionInputs]
    checked: torch.Tensor
    exact: torch.Tensor
    slice_rows: int


def rows(job: Job) -> Iterator[SpeedRow]:
    """One row per case and method. Raises Cancelled."""
    cases = attention_cases(job.request, job.device)
    methods = _methods(job)
    shares = Shares(job.effort.parts_s["attention"], len(cases) * len(methods))
    for name, size, problem in cases:
        where = f"{size}x{size}"
        empty = [SpeedRow("attention", name, method) for method in methods]
        try:
            case = Guard(job.cancelled).beside(partial(_case, problem, job))
        except Cancelled:
            raise
        except FAILED as failure:
            yield from (replace(row, reason=why(failure, where)) for row in empty)
            job.clean()
            continue
        for row in empty:
            share_s = shares.next_s()
            job.told(shares.fraction, f"attention, {name}: {row.method}")
            yield _row(row, methods[row.method], case, job, share_s, where)
        del case
        job.clean()


def _methods(job: Job) -> dict[str, Attention | None]:
    """By the name in the table, ours first; None is ours, which depends on the problem."""
    found: dict[str, Attention | None] = {"rocm_sd": None}
    whose = getattr(job.side, "host_name", "WebUI")
    for name, method in job.side.attention_methods().items():
        found[f"{whose}'s current ({name})"] = method
    variants: tuple[Variant[AttentionProblem, AttentionInputs], ...] = (*METHODS, SdpaAttention())
    for variant in variants:
        name = SDP if variant.name == "sdpa" else variant.name
        found[name] = partial(_alone, variant)
    return found


def _alone(
    variant: Variant[AttentionProblem, AttentionInputs],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    inputs = AttentionInputs(q, k, v, mask, scale)
    made: torch.Tensor = variant.run(Call(problem_of(inputs), inputs))
    return made


def _case(problem: AttentionProblem, job: Job) -> _Case:
    kind = "cuda" if job.device.type == "cuda" else "cpu"
    if problem.flops > MOST_FLOPS[kind]:
        raise ValueError(f"one call would take {problem.flops / 1e12:.0f} TFLOP: not measured")
    values = problem.batch * problem.heads * problem.seq_q * problem.head_dim
    if values > MOST_VALUES[kind]:
        raise ValueError(f"its queries would have {values / 1e6:.0f} million values: not measured")
    slices = math.ceil(problem.flops / SLICE_FLOPS[kind])
    sets = input_sets(ATTENTION, problem, job.device)
    count = min(problem.seq_q, CHECKED_QUERIES)
    places = torch.linspace(0, problem.seq_q - 1, count).round().long().to(job.device)
    first = sets[0]
    return _Case(
        problem,
        sets,
        places,
        exact(first._replace(q=first.q[:, places])),
        -(-problem.seq_q // slices),
    )


def _row(
    row: SpeedRow, method: Attention | None, case: _Case, job: Job, share_s: float, where: str
) -> SpeedRow:
    """The row with its figures, or with the reason why there are none."""
    try:
        if method is None:
            plan = Guard(job.cancelled).beside(
                partial(engine.plan, case.problem, job.device, session=job.side.session)
            )
            if not plan.variant.ours:
                return replace(row, reason=_refusal(plan.refusals))
            row = replace(row, note=plan.why)
            method = partial(functional.attention, session=job.side.session)
        return _figures(row, method, case, job, share_s)
    except Cancelled:
        raise
    except FAILED as failure:
        return replace(row, reason=why(failure, where))
    finally:
        job.clean()


def _refusal(refusals: Mapping[str, list[str]]) -> str:
    ours = [variant.name for variant in ATTENTION.variants if variant.ours]
    said = [text for name in ours for text in refusals.get(name, [])]
    return "; ".join(dict.fromkeys(said)) or "another method is planned here"


def _figures(row: SpeedRow, method: Attention, case: _Case, job: Job, share_s: float) -> SpeedRow:
    guard, device = job.guard(), job.device
    run = _run(method, case, guard, device)
    out = run(0)
    peak = Peak(device)
    out = run(0)
    row = replace(row, peak_mib=peak.mib(), error=_error(out, case))
    allowance = 1.0 if row.method in ("rocm_sd", SDP) else ALLOWANCE
    if not row.error <= allowance * ATTENTION.tolerance(case.problem):
        error = f"{row.error:.1e}" if math.isfinite(row.error) else "NaN or infinity"
        return replace(row, reason=f"wrong: error {error}")
    del out
    times = guard.times_us(lambda number: _discard(run(number)), device, share_s, job.effort.runs)
    return replace(row, **spread(times), note=_note(row, case))


def _run(
    method: Attention, case: _Case, guard: Guard, device: torch.device
) -> Callable[[int], torch.Tensor]:
    """A call of the method on the inputs of a number; between slices it may be stopped."""
    whole = case.slice_rows >= case.problem.seq_q

    def run(number: int) -> torch.Tensor:
        q, k, v = case.sets[number % len(case.sets)][:3]
        if whole:
            return method(q, k, v)  # type: ignore[no-any-return]
        made = []
        for queries in q.split(case.slice_rows, 1):
            made.append(method(queries, k, v))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            guard.check()
        return torch.cat(made, 1)

    return run


def _discard(output: torch.Tensor) -> None:
    del output


def _error(out: torch.Tensor, case: _Case) -> float:
    """Largest error of the checked queries, relative to the largest exact value; infinite where
    anything in the output is not finite.
    """
    p = case.problem
    shape = (p.batch, p.seq_q, p.heads * p.head_dim)
    if tuple(out.shape) != shape:
        raise ValueError(f"the output is {tuple(out.shape)}, expected {shape}")
    if not math.isfinite(float(out.sum(dtype=torch.float32))):
        return math.inf
    gap = (out[:, case.checked].double() - case.exact).abs().max()
    return float(gap / case.exact.abs().max())


def _note(row: SpeedRow, case: _Case) -> str:
    slices = -(-case.problem.seq_q // case.slice_rows)
    parts = [row.note, f"in {slices} slices of queries" if slices > 1 else ""]
    return "; ".join(part for part in parts if part)
