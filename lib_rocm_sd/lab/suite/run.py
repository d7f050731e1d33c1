"""Measures workloads by all ways in one run: in turns, after a first picture, with the card's power
and each way's distance from float32.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lib_rocm_sd.lab.rows import NAN, Row, spread
from lib_rocm_sd.lab.sensors import Source, Summary, Watch, measured_power
from lib_rocm_sd.lab.suite import quality
from lib_rocm_sd.lab.suite.painter import Enlarger, Painter, Shot
from lib_rocm_sd.lab.suite.workloads import Workload
from lib_rocm_sd.lab.timing import FAILED, Peak, clean, no_tf32, why

Way = Callable[[Any], AbstractContextManager[Callable[[], str]]]
"""Within it, a pipeline works this way; what it gives tells what ran."""
Keep = Callable[[Workload, Mapping[str, Any], Mapping[str, quality.Distance]], None]
"""Told the last picture of each way, "float32" among them, and how far each is from that."""
EXACT = "float32"
LONG_S = 10.0
"""A picture that takes longer is timed once in a turn."""


class NotHere(Exception):  # noqa: N818 - nothing went wrong
    """A way does not exist on this machine; `str()` says why."""


@dataclass(frozen=True)
class Plan:
    """What is run. `painters`: by model. `sensors`: opens what reads the card, or says why nothing
    does. `turns`: of each way; `pictures`: timed in a turn, if they are short. `told`: progress.
    """

    workloads: Sequence[Workload]
    painters: Callable[[str], Painter | Enlarger]
    ways: Mapping[str, Way]
    sensors: Callable[[], Source | str]
    turns: int
    pictures: int
    prompts: Sequence[str]
    told: Callable[[str], None]
    keep: Keep = lambda workload, pictures, distances: None


@dataclass
class _Tally:
    """A way's shots. `first_s`: its first picture in this process; `pictures`: timed in each turn,
    0 before the first.
    """

    shots: list[Shot] = field(default_factory=list)
    pictures: int = 0
    sensors: list[Summary] = field(default_factory=list)
    first_s: float = NAN
    peak_mib: float = NAN
    ran: str = ""
    reason: str = ""
    trouble: str = ""
    image: Any = None


def rows(plan: Plan) -> Iterator[Row]:
    """The rows of each workload, as they come: "picture" of each way, then its parts."""
    for workload in plan.workloads:
        yield from _of_workload(plan, workload)


def _of_workload(plan: Plan, workload: Workload) -> Iterator[Row]:
    tallies = {name: _Tally() for name in plan.ways}
    try:
        painter = plan.painters(workload.model)
        if isinstance(painter, Painter) and workload.kind == "lora":
            painter = painter.with_lora()
        plan.told(f"{workload.name}: in float32")
        exact, absent = _exact(painter, workload, plan.prompts)
    except (ImportError, *FAILED) as failure:  # PEFT may be missing
        for name in plan.ways:
            yield Row("picture", workload.name, name, "s", reason=why(failure))
        return
    for turn in range(plan.turns):
        for name in list(plan.ways)[:: -1 if turn % 2 else 1]:
            plan.told(f"{workload.name}: {name}, turn {turn + 1} of {plan.turns}")
            _take_turn(plan, workload, painter, name, tallies[name])
    pictures = {name: tally.image for name, tally in tallies.items() if tally.image is not None}
    distances = {}
    if exact is not None:
        distances = {name: quality.distance(exact, image) for name, image in pictures.items()}
        pictures[EXACT] = exact
    plan.keep(workload, pictures, distances)
    for name, tally in tallies.items():
        yield from _finished(workload, name, tally, distances.get(name), absent)


def _exact(
    painter: Painter | Enlarger, workload: Workload, prompts: Sequence[str]
) -> tuple[Any, str]:
    """The workload's first picture in float32, or why there is none."""
    try:
        with _cleaned(painter.device), no_tf32():
            shot = painter.in_float32().paint(workload, prompts)
    except FAILED as failure:
        return None, f"not compared with float32: {why(failure)}"
    if shot.trouble:
        return None, f"not compared with float32: there {shot.trouble}"
    return shot.images[0], ""


@contextmanager
def _cleaned(device: torch.device) -> Iterator[None]:
    """Give memory back afterwards, which fails on a card that has been lost."""
    try:
        yield
    finally:
        clean(device)


def _take_turn(
    plan: Plan, workload: Workload, painter: Painter | Enlarger, name: str, tally: _Tally
) -> None:
    """One picture that does not count, and those that do; or why there are none."""
    if tally.reason:
        return
    try:
        with _cleaned(painter.device), plan.ways[name](painter.pipeline) as ran:
            first = painter.paint(workload, plan.prompts)
            if math.isnan(tally.first_s):
                tally.first_s = first.seconds
            peak, watch = Peak(painter.device), Watch(plan.sensors())
            with watch.looking():
                shots = [painter.paint(workload, plan.prompts)]
                if not tally.pictures:
                    tally.pictures = plan.pictures if shots[0].seconds < LONG_S else 1
                for _ in range(tally.pictures - 1):
                    shots.append(painter.paint(workload, plan.prompts))
            tally.shots += shots
            tally.sensors.append(watch.summary())
            tally.peak_mib, tally.ran = peak.mib(), ran()
            tally.trouble = tally.trouble or next(filter(None, (s.trouble for s in shots)), "")
            tally.image = None if tally.trouble else shots[-1].images[0]
    except NotHere as reason:
        tally.reason = str(reason)
    except FAILED as failure:
        tally.reason = why(failure)


def _finished(
    workload: Workload,
    name: str,
    tally: _Tally,
    apart: quality.Distance | None,
    absent: str,
) -> Iterator[Row]:
    row = Row("picture", workload.name, name, "s", reason=tally.reason)
    if not tally.shots:
        yield row
        return
    ended = f"ended early: {tally.reason}" if tally.reason else ""
    steps = [step for shot in tally.shots for step in shot.steps]
    cpu = [shot.cpu / len(shot.steps) for shot in tally.shots if shot.steps]
    row = replace(
        row,
        **spread([shot.seconds for shot in tally.shots]),
        first=tally.first_s,
        peak_mib=tally.peak_mib,
        cpu_ms=1000 * statistics.median(cpu) if cpu else NAN,
        ran=tally.ran,
        reason="",
        note="; ".join(filter(None, (ended, tally.trouble, absent))),
        **measured_power(tally.sensors, tally.pictures * workload.batch),
    )
    if apart is not None:
        row = replace(row, psnr=apart.psnr, ssim=apart.ssim, flip=apart.flip, largest=apart.largest)
    yield row
    parts = {
        part: [getattr(shot, field) for shot in tally.shots]
        for part, field in (
            ("text encoder", "text"),
            ("decode", "decode"),
            ("upscale", "upscale"),
            ("host", "host"),
        )
    }
    for part, seconds in {**parts, "step": steps}.items():
        if any(seconds):
            yield Row(part, workload.name, name, "ms", **spread(seconds, 1000.0))


def idle_power_w(source: Source | str, device: torch.device, seconds: float) -> float | None:
    """What the card draws while nothing runs; None where it does not tell."""
    clean(device)
    watch = Watch(source)
    with watch.looking():
        watch.wait(seconds)
    power = watch.summary().power_w
    return round(power.mean, 1) if power else None
