"""The speed test's attention, denoising steps and whole images.

Attention: ours, the host's, and what else its users pick; each verified, then timed.

A step of the host's UNet: without this extension and with its blocks ours, compared with the host's
own step in the same precision: one in float32 would take twice the UNet's memory. So the error is
that of both. A picture that a network upscales, likewise.

Whole images: the same prompt, seed and sampler with the extension off, on, and on with the UNet's
blocks ours, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lib_rocm_sd import functional
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.measure import input_sets
from lib_rocm_sd.lab.methods import ALLOWANCE, METHODS, Exact, expected
from lib_rocm_sd.lab.rows import Row, spread
from lib_rocm_sd.lab.sensors import Summary, Watch, measured_power, of_device
from lib_rocm_sd.lab.speed_job import (
    FAILED,
    Attention,
    Guard,
    HostCall,
    Job,
    Picture,
    PictureWish,
    Shares,
    attention_cases,
    side,
    why,
)
from lib_rocm_sd.lab.speed_result import OURS, Pair
from lib_rocm_sd.lab.timing import Peak, wait, wall_ms
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
    """A problem with its inputs, and what is exact of some queries. A call takes `slice_rows`
    queries at most.
    """

    problem: AttentionProblem
    sets: list[AttentionInputs]
    exact: Exact
    slice_rows: int

    @property
    def slices(self) -> int:
        """How many calls all queries take."""
        return -(-self.problem.seq_q // self.slice_rows)


def attention_rows(job: Job) -> Iterator[Row]:
    """One row per case and method. Raises Cancelled."""
    cases = attention_cases(job.request, job.device)
    methods = _attention_methods(job)
    shares = Shares(job.effort.parts_s["attention"], len(cases) * len(methods))
    for name, size, problem in cases:
        rows = [Row("attention", name, method) for method in methods]
        try:
            case = Guard(job.cancelled).beside(partial(_prepared, problem, job))
        except FAILED as failure:
            yield from (replace(row, reason=why(failure, side(size))) for row in rows)
            job.clean()
            continue
        for row in rows:
            share_s = shares.next_s()
            job.told(shares.fraction, f"attention, {name}: {row.way}")
            yield job.row(row, size, _attention_row, methods[row.way], case, job, share_s)
        del case
        job.clean()


def _attention_methods(job: Job) -> dict[str, Attention | None]:
    """By the name in the table, ours first; None is ours, which depends on the problem."""
    methods: dict[str, Attention | None] = {OURS["attention"]: None}
    whose = getattr(job.side, "host_name", "WebUI")
    for name, method in job.side.attention_methods().items():
        methods[f"{whose}'s current ({name})"] = method
    for variant in METHODS:
        methods[variant.name] = partial(_alone, variant)
    return {**methods, SDP: partial(_alone, SdpaAttention())}


def _alone(
    variant: Variant[AttentionProblem, AttentionInputs],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    inputs = AttentionInputs(q, k, v)
    output: torch.Tensor = variant.run(Call(problem_of(inputs), inputs))
    return output


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
    places = torch.linspace(0, problem.seq_q - 1, count).round().long()
    right = expected(sets[0], problem, places)
    return _Case(problem, sets, right, -(-problem.seq_q // slices))


def _attention_row(
    row: Row, method: Attention | None, case: _Case, job: Job, share_s: float
) -> Row:
    guard, device, notes = job.guard(), job.device, []
    if method is None:
        ask = partial(engine.plan, case.problem, device, session=job.side.session)
        plan = Guard(job.cancelled).beside(ask)
        if not plan.variant.ours:
            names = [variant.name for variant in ATTENTION.variants if variant.ours]
            reasons = dict.fromkeys(text for name in names for text in plan.refusals.get(name, []))
            return replace(row, reason="; ".join(reasons) or "another method is planned here")
        notes.append(plan.why)
        method = partial(functional.attention, session=job.side.session)
    run = partial(_attended, method, case, guard)
    run(0)
    peak = Peak(device)
    row = replace(row, error=case.exact.error(run(0)), peak_mib=peak.mib())
    allowance = 1.0 if row.way in (OURS["attention"], SDP) else ALLOWANCE
    if not row.error <= allowance * ATTENTION.tolerance(case.problem):
        error = f"{row.error:.1e}" if math.isfinite(row.error) else "NaN or infinity"
        return replace(row, reason=f"wrong: error {error}", note="; ".join(notes))
    times = guard.times_us(run, device, share_s, job.effort.runs)
    notes += [f"in {case.slices} slices of queries"] if case.slices > 1 else []
    return replace(row, **spread(times, 1e-3), note="; ".join(filter(None, notes)))


def _attended(method: Attention, case: _Case, guard: Guard, number: int) -> torch.Tensor:
    """The method's output for the inputs of a number; between slices it may be stopped."""
    q, k, v = case.sets[number % len(case.sets)][:3]
    if case.slices == 1:
        return method(q, k, v)  # type: ignore[no-any-return]
    parts = []
    for queries in q.split(case.slice_rows, 1):
        parts.append(method(queries, k, v))
        wait(q.device)
        guard.check()
    return torch.cat(parts, 1)


IN_A_ROW, CHUNK_MS = 10, 250.0
"""A sampler's steps follow one another without a wait: as many are timed together, in such time."""
LEAST_TIMES = 3
MOST_ERROR = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3, "uint8": 2 / 255}
"""A larger one, relative to the largest value, is not by rounding alone."""


def step_rows(job: Job) -> Iterator[Row]:
    """Per size, both: ms a step. Raises Cancelled."""
    return _both_rows(job, "step", "UNet", job.side.unet, "a step, {}, batch 2")


def upscaler_rows(job: Job) -> Iterator[Row]:
    """Per size, both: ms a picture. Raises Cancelled."""
    return _both_rows(job, "upscaler", "upscaler", job.side.upscaler, "{} upscaled")


def _both_rows(
    job: Job, test: str, what: str, get: Callable[[], HostCall | None], name: str
) -> Iterator[Row]:
    """Rows of the host's own code and of ours."""
    shares = Shares(job.effort.parts_s[test], 2 * len(job.sizes))
    subject, reason = None, f"there is no {what} to run"
    try:
        subject = get()
    except FAILED as failure:
        reason = why(failure, "loading")
    for size in job.sizes:
        case = name.format(side(size))
        if subject is None:
            yield Row(test, case, OURS[test], reason=reason)
            continue
        outputs: list[torch.Tensor] = []
        for method, inside in ((OFF, subject.theirs), (OURS[test], subject.ours)):
            job.told(shares.fraction, f"{case}, {method}")
            row = Row(test, case, method)
            share_s = shares.next_s()
            yield job.row(row, size, _call_row, job, subject, size, inside, outputs, share_s)


def _call_row(
    row: Row,
    job: Job,
    subject: HostCall,
    size: int,
    inside: Callable[[], AbstractContextManager[Any]],
    outputs: list[torch.Tensor],
    share_s: float,
) -> Row:
    """The row of a method; its result is added to `outputs`, whose first is compared with."""
    at = subject.compared_at or size
    checked = f"checked at {side(at)}" if at != size else ""
    row = replace(row, note="; ".join(filter(None, (subject.note, checked))))
    with inside():
        guard = job.guard()
        guard.check()
        output = guard.beside(_with(subject, at))
        output = (output if isinstance(output, torch.Tensor) else output[0]).cpu().double()
        outputs.append(output)
        error = float((output - outputs[0]).abs().max() / outputs[0].abs().max())
        if not error <= MOST_ERROR.get(subject.dtype, 0.0):
            return replace(row, reason=f"wrong: error {error:.1e}")
        call = _with(subject, size)
        times = _step_times(call, guard, job, share_s)
        peak = Peak(job.device)
        call()
        return replace(row, **spread(times), peak_mib=peak.mib(), error=error)


def _with(subject: HostCall, size: int) -> Callable[[], Any]:
    args, kwargs = subject.arguments(size)
    return partial(subject.call, *args, **kwargs)


def _step_times(step: Callable[[], Any], guard: Guard, job: Job, share_s: float) -> list[float]:
    """In ms of wall time."""
    wall_ms(step, job.device)
    each_ms = max(wall_ms(step, job.device), 1e-3)
    count = max(1, min(IN_A_ROW, int(CHUNK_MS / each_ms)))
    most = min(job.effort.runs, int(1000 * share_s / (each_ms * count)))
    times: list[float] = []
    while len(times) < max(most, LEAST_TIMES):
        guard.check()
        times.append(wall_ms(step, job.device, count))
    return times


OFF, ON, UNET = "extension off", "extension on", "extension on, UNet"
PICTURE_METHODS = (OFF, ON, UNET)
WARM_UP_STEPS = 2
AMPLIFIED = 16
"""The difference picture's."""


def image_rows(job: Job) -> Iterator[Row]:
    """Per size and method: a row in s per image and one in steps per second. Raises Cancelled."""
    shares = Shares(job.effort.parts_s["image"], len(job.sizes))
    for place, size in enumerate(job.sizes):
        pictures = _Pictures(job, size, place)
        pictures.make(shares.next_s())
        for method, case in ((ON, pictures.case), (UNET, f"{pictures.case}, UNet")):
            pictures.compare(method, case)
        for method in PICTURE_METHODS:
            yield from pictures.rows(method)


class _Pictures:
    """The pictures of one size, `place` among the sizes, by method; why a method has none."""

    def __init__(self, job: Job, size: int, place: int) -> None:
        self.job, self.size, self.place = job, size, place
        self.case = f"{side(size)}, {job.effort.steps} steps"
        self.reasons: dict[str, str] = {}
        self.pictures: dict[str, list[Picture]] = {method: [] for method in PICTURE_METHODS}
        self.power: dict[str, list[Summary]] = {method: [] for method in PICTURE_METHODS}
        self.begun = 0

    def make(self, share_s: float) -> None:
        """One each, of few steps, to warm up; then in turns, each first as often, until the size's
        share of time is over.
        """
        effort = self.job.effort
        for method in PICTURE_METHODS:
            self._make(method, min(WARM_UP_STEPS, effort.steps), "warming up")
        for turn in range(effort.pictures):
            for method in PICTURE_METHODS[:: -1 if turn % 2 else 1]:
                picture = self._make(method, effort.steps, f"{turn + 1} of {effort.pictures}")
                self.pictures[method] += [] if picture is None else [picture]
            if sum(p.seconds for each in self.pictures.values() for p in each) > share_s:
                return

    def _make(self, method: str, steps: int, text: str) -> Picture | None:
        """None where it failed, now or before."""
        if method in self.reasons:
            return None
        job, begun = self.job, self.begun
        most = len(PICTURE_METHODS) * (1 + job.effort.pictures)

        def progress(fraction: float) -> None:
            part = (begun + min(max(fraction, 0.0), 1.0)) / most
            whole = (self.place + part) / len(job.sizes)
            job.told(whole, f"{self.case}, {method}: {text}")

        progress(0.0)
        self.begun += 1
        try:
            job.guard().check()
            enabled, unet = method != OFF, method == UNET
            wish = PictureWish(steps, self.size, enabled, unet, progress, job.cancelled)
            watch = Watch(of_device(job.device, identify(job.device)))
            with watch.looking():
                picture = job.side.image(wish)
        except FAILED as failure:
            self.reasons[method] = why(failure, side(self.size))
            return None
        else:
            self.power[method].append(watch.summary())
            return picture
        finally:
            job.clean()

    def rows(self, method: str) -> Iterator[Row]:
        """The rows of a method, or one with nothing but a reason."""
        row, pictures = Row("image", self.case, method, "s"), self.pictures[method]
        reason = self.reasons.get(method, "" if pictures else "no picture was made")
        if reason:
            yield replace(row, reason=reason)
            return
        peaks = [p.peak_mib for p in pictures if math.isfinite(p.peak_mib)]
        row = replace(row, peak_mib=max(peaks, default=math.nan))
        counted = self.power[method][-len(pictures) :]  # without the one that warms up
        yield replace(row, **spread([p.seconds for p in pictures]), **measured_power(counted))
        speeds = [p.it_per_s for p in pictures if math.isfinite(p.it_per_s)]
        if speeds:
            yield replace(row, unit="it/s", **spread(speeds))

    def compare(self, method: str, case: str) -> None:
        """Keep the last picture of a method beside the last one with the extension off, if there
        are both.
        """
        off, on = self.pictures[OFF], self.pictures[method]
        if not off or not on or self.reasons.keys() & {OFF, method}:
            return
        try:
            apart, largest, mean = difference(off[-1].image, on[-1].image)
        except ValueError as error:
            self.reasons[method] = str(error)
        else:
            self.job.shots.append(Pair(case, off[-1], on[-1], apart, largest, mean))


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
    return Image.fromarray(visible), int(gap.max()), round(float(gap.mean()), 4)


def plain(image: Any) -> Any:
    """The pixels alone: what a host notes in an image's file stays out of ours."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.asarray(image.convert("RGB")))
