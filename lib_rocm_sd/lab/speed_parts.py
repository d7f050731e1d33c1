"""The speed test's attention, denoising steps and whole images.

Attention: ours, the host's, and what else its users pick; each verified, then timed.

A step of the host's UNet: without this extension and with its blocks ours, compared with the host's
own step in the same precision: one in float32 would take twice the UNet's memory. So the error is
that of both.

Whole images: the same prompt, seed and sampler with the extension off, on, and on with the UNet's
blocks ours, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lib_rocm_sd import functional
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.measure import input_sets
from lib_rocm_sd.lab.methods import ALLOWANCE, METHODS, Exact, exact
from lib_rocm_sd.lab.rows import Row, spread
from lib_rocm_sd.lab.speed_job import (
    FAILED,
    Attention,
    Cancelled,
    Denoiser,
    Guard,
    Job,
    Picture,
    Shares,
    Shot,
    attention_cases,
    sizes,
    why,
)
from lib_rocm_sd.lab.speed_result import OURS
from lib_rocm_sd.lab.timing import Peak, wall_ms
from lib_rocm_sd.ops.attention.inputs import AttentionInputs, problem_of
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention.torch import SdpaAttention
from lib_rocm_sd.ops.base import Call, Variant

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
    """A problem with its inputs, and what is exact of some queries."""

    problem: AttentionProblem
    sets: list[AttentionInputs]
    exact: Exact
    slice_rows: int


def attention_rows(job: Job) -> Iterator[Row]:
    """One row per case and method. Raises Cancelled."""
    cases = attention_cases(job.request, job.device)
    methods = _attention_methods(job)
    shares = Shares(job.effort.parts_s["attention"], len(cases) * len(methods))
    for name, size, problem in cases:
        where = f"{size}x{size}"
        empty = [Row("attention", name, method) for method in methods]
        try:
            case = Guard(job.cancelled).beside(partial(_prepared, problem, job))
        except Cancelled:
            raise
        except FAILED as failure:
            yield from (replace(row, reason=why(failure, where)) for row in empty)
            job.clean()
            continue
        for row in empty:
            share_s = shares.next_s()
            job.told(shares.fraction, f"attention, {name}: {row.way}")
            yield _attention_row(row, methods[row.way], case, job, share_s, where)
        del case
        job.clean()


def _attention_methods(job: Job) -> dict[str, Attention | None]:
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


def _prepared(problem: AttentionProblem, job: Job) -> _Case:
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
    shape = (problem.batch, problem.seq_q, problem.heads * problem.head_dim)
    right = exact(sets[0]._replace(q=sets[0].q[:, places]))
    return _Case(problem, sets, Exact(right, places, shape), -(-problem.seq_q // slices))


def _attention_row(
    row: Row, method: Attention | None, case: _Case, job: Job, share_s: float, where: str
) -> Row:
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


def _figures(row: Row, method: Attention, case: _Case, job: Job, share_s: float) -> Row:
    guard, device = job.guard(), job.device
    run = _run(method, case, guard, device)
    out = run(0)
    peak = Peak(device)
    out = run(0)
    row = replace(row, peak_mib=peak.mib(), error=case.exact.error(out))
    allowance = 1.0 if row.way in ("rocm_sd", SDP) else ALLOWANCE
    if not row.error <= allowance * ATTENTION.tolerance(case.problem):
        error = f"{row.error:.1e}" if math.isfinite(row.error) else "NaN or infinity"
        return replace(row, reason=f"wrong: error {error}")
    del out
    times = guard.times_us(lambda number: _discard(run(number)), device, share_s, job.effort.runs)
    return replace(row, **spread(times, 1e-3), note=_note(row, case))


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


def _note(row: Row, case: _Case) -> str:
    slices = -(-case.problem.seq_q // case.slice_rows)
    parts = [row.note, f"in {slices} slices of queries" if slices > 1 else ""]
    return "; ".join(part for part in parts if part)


IN_A_ROW, CHUNK_MS = 10, 250.0
"""A sampler's steps follow one another without a wait: as many are timed together, in such time."""
LEAST_TIMES = 3
MOST_ERROR = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
"""A larger one, relative to the largest value, is not by rounding alone."""
Step = Callable[[], Any]


def step_rows(job: Job) -> Iterator[Row]:
    """Per size, both: ms a step. Raises Cancelled."""
    wanted = sizes(job.request, job.device)
    shares = Shares(job.effort.parts_s["step"], 2 * len(wanted))
    try:
        unet = job.side.unet()
    except Cancelled:
        raise
    except FAILED as failure:
        unet, reason = None, why(failure, "loading")
    else:
        reason = "" if unet else "there is no UNet to run"
    for size in wanted:
        if unet is None:
            yield Row("step", _step_case(size), OURS["step"], reason=reason)
            continue
        outputs: list[torch.Tensor] = []
        for method, inside in ((OFF, unet.theirs), (OURS["step"], unet.ours)):
            job.told(shares.fraction, f"{_step_case(size)}, {method}")
            try:
                with inside():
                    row = _step_row(job, unet, size, method, outputs, shares.next_s())
            except Cancelled:
                raise
            except FAILED as failure:
                row = Row("step", _step_case(size), method, reason=why(failure, f"{size}x{size}"))
            finally:
                job.clean()
            yield row


def _step_case(size: int) -> str:
    return f"a step, {size}x{size}, batch 2"


def _step_row(
    job: Job, unet: Denoiser, size: int, method: str, outputs: list[torch.Tensor], share_s: float
) -> Row:
    """The row of a method; its result is added to `outputs`, whose first is compared with."""
    args, kwargs = unet.arguments(size)
    guard = job.guard()

    def step() -> Any:
        return unet.call(*args, **kwargs)

    guard.check()
    made = guard.beside(step)
    made = (made if isinstance(made, torch.Tensor) else made[0]).cpu().double()
    row = replace(Row("step", _step_case(size), method), note=unet.note)
    outputs.append(made)
    error = float((made - outputs[0]).abs().max() / outputs[0].abs().max())
    if not error <= MOST_ERROR.get(unet.dtype, 0.0):
        return replace(row, reason=f"wrong: error {error:.1e}")
    times = _times(step, guard, job, share_s)
    peak = Peak(job.device)
    step()
    return replace(row, **spread(times), peak_mib=peak.mib(), error=error)


def _times(step: Step, guard: Guard, job: Job, share_s: float) -> list[float]:
    """Sorted, in ms of wall time."""
    wall_ms(step, job.device)
    each_ms = max(wall_ms(step, job.device), 1e-3)
    count = max(1, min(IN_A_ROW, int(CHUNK_MS / each_ms)))
    most = min(job.effort.runs, int(1000 * share_s / (each_ms * count)))
    times: list[float] = []
    while len(times) < max(most, LEAST_TIMES):
        guard.check()
        times.append(wall_ms(step, job.device, count))
    return sorted(times)


OFF, ON, UNET = "extension off", "extension on", "extension on, UNet"
PICTURE_METHODS = (OFF, ON, UNET)
WARM_UP_STEPS = 2
AMPLIFIED = 16
"""The difference picture's."""


def image_rows(job: Job) -> Iterator[Row]:
    """Per size and method: a row in s per image and one in steps per second. Raises Cancelled."""
    wanted = sizes(job.request, job.device)
    shares = Shares(job.effort.parts_s["image"], len(wanted))
    for size in wanted:
        taken = _Taken(job, size, shares.next_s(), shares)
        taken.warm_up()
        taken.measure()
        job.shots += taken.shots()
        yield from taken.rows()


class _Taken:
    """The pictures of one size."""

    def __init__(self, job: Job, size: int, share_s: float, shares: Shares) -> None:
        self.job = job
        self.size = size
        self.steps = job.effort.steps
        self.case = f"{size}x{size}, {self.steps} steps"
        self.shares = shares
        self.share_s = share_s
        self.reasons: dict[str, str] = {}
        self.pictures: dict[str, list[Picture]] = {method: [] for method in PICTURE_METHODS}
        self.made = 0

    def warm_up(self) -> None:
        """One each, of few steps."""
        for method in PICTURE_METHODS:
            self._make(method, min(WARM_UP_STEPS, self.steps), "warming up")

    def measure(self) -> None:
        """In turns, each first as often, until the size's share of time is over."""
        most = self.job.effort.pictures
        for turn in range(most):
            order = PICTURE_METHODS if turn % 2 == 0 else PICTURE_METHODS[::-1]
            for method in order:
                picture = self._make(method, self.steps, f"{turn + 1} of {most}")
                if picture is not None:
                    self.pictures[method].append(picture)
            if sum(p.seconds for both in self.pictures.values() for p in both) > self.share_s:
                return

    def _make(self, method: str, steps: int, text: str) -> Picture | None:
        """None where it failed, now or before."""
        if method in self.reasons:
            return None
        job, done = self.job, self.made
        all_of_them = len(PICTURE_METHODS) * (1 + job.effort.pictures)
        before = max(self.shares.rows - self.shares.left - 1, 0)

        def progress(fraction: float) -> None:
            part = (done + min(max(fraction, 0.0), 1.0)) / all_of_them
            job.told((before + part) / self.shares.rows, f"{self.case}, {method}: {text}")

        progress(0.0)
        self.made += 1
        try:
            job.guard().check()
            asked = (steps, self.size, method != OFF, progress, job.cancelled)
            return job.side.image(*asked, unet=method == UNET)
        except Cancelled:
            raise
        except FAILED as failure:
            self.reasons[method] = why(failure, f"{self.size}x{self.size}")
            return None
        finally:
            job.clean()

    def rows(self) -> list[Row]:
        """Rows of all methods, including those with nothing but a reason."""
        found = []
        for method in PICTURE_METHODS:
            row = Row("image", self.case, method, "s", reason=self.reasons.get(method, ""))
            pictures = self.pictures[method]
            if row.reason or not pictures:
                found.append(replace(row, reason=row.reason or "no picture was made"))
                continue
            peaks = [p.peak_mib for p in pictures if math.isfinite(p.peak_mib)]
            row = replace(row, peak_mib=max(peaks, default=math.nan))
            found.append(replace(row, **spread([p.seconds for p in pictures])))
            speeds = [p.it_per_s for p in pictures if math.isfinite(p.it_per_s)]
            if speeds:
                found.append(replace(row, unit="it/s", **spread(speeds)))
        return found

    def shots(self) -> list[Shot]:
        """The last ones with the extension on, each beside the last one with it off."""
        cases = {ON: self.case, UNET: f"{self.case}, UNet"}
        found = [self._shot(method, case) for method, case in cases.items()]
        return [shot for shot in found if shot is not None]

    def _shot(self, method: str, case: str) -> Shot | None:
        """None where one of the two is missing."""
        off, on = self.pictures[OFF], self.pictures[method]
        if not off or not on or self.reasons.keys() & {OFF, method}:
            return None
        try:
            picture, largest, mean = difference(off[-1].image, on[-1].image)
        except ValueError as error:
            self.reasons[method] = str(error)
            return None
        return Shot(case, off[-1], on[-1], picture, largest, mean)


def difference(off: Any, on: Any) -> tuple[Any, int, float]:
    """The amplified difference of two images, its largest value and its mean, of 255.

    Raises ValueError where their sizes differ.
    """
    import numpy as np
    from PIL import Image

    if off.size != on.size:
        raise ValueError(f"the pictures have different sizes: {off.size} and {on.size}")
    one, other = (np.asarray(image.convert("RGB"), dtype=np.int16) for image in (off, on))
    gap = np.abs(one - other)
    visible = (gap * AMPLIFIED).clip(0, 255).astype(np.uint8)
    return Image.fromarray(visible), int(gap.max()), float(gap.mean())


def plain(image: Any) -> Any:
    """The pixels alone: what a host notes in an image's file stays out of ours."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.asarray(image.convert("RGB")))
