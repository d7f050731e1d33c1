"""`bench models`: whole models of diffusers, with what people do to them, by torch and by
hosts/diffusers, in turns.

Steps follow one another without a wait, as a sampler's do. `device_ms` is a step's time by the
device's events: where the device waits for the CPU, the CPU's. Errors are to the same model in
float32. What a start of a host tries was tried before the first row.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from lib_rocm_sd.checks import UsageError
from lib_rocm_sd.engine.measure import timed
from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.lab import rows as lines
from lib_rocm_sd.lab.benchmark import Benchmark, Setting
from lib_rocm_sd.lab.model_cases import CASES, Case, Scene
from lib_rocm_sd.lab.rows import OURS, Columns, Countdown, Row, TextTable, is_named, spread
from lib_rocm_sd.lab.timing import FAILED, Peak, allocated, clean, no_tf32, wall_ms, why
from lib_rocm_sd.lab.unet import compared, submit_ms, tried_ahead
from lib_rocm_sd.report import Report

TURNS, QUICK_TURNS = 5, 2
STEPS = 4
"""In one way's turn."""
WARM_UP = 6
"""Steps before the first turn: the first of a shape records what later ones replay."""
EAGER, COMPILED = "torch", "torch.compile"
COLUMNS = Columns(
    "case way runs device_ms=median p10_ms=p10 p90_ms=p90 wall_ms submit_ms of_eager of_plain "
    "prepare_s peak_mib kept_mib error rms blocks told reason"
)
"""`of_eager`: over the time of torch; `of_plain`: over that of the same way without what is done to
the model. `prepare_s`: the first step. `kept_mib`: beside the model.
"""
TEXT = TextTable(
    (lines.field("case", -36, "case"), lines.field("way", -13, "way")),
    (
        lines.field("ms", 8, "median", ".2f", "-"),
        lines.between(15, ".2f"),
        lines.field("of torch", 8, "of_eager", ".2f", "-"),
        lines.field("of plain", 8, "of_plain", ".2f", "-"),
        lines.field("wall", 8, "wall_ms", ".2f", "-"),
        lines.field("submit", 7, "submit_ms", ".2f", "-"),
        lines.field("MiB", 6, "peak_mib", ".0f", "-"),
        lines.field("kept", 6, "kept_mib", ".0f", "-"),
        lines.field("error", 8, "error", ".1e", "-"),
        lines.field("rms", 8, "rms", ".1e", "-"),
        lines.field("blocks", 10, "blocks"),
    ),
    absent="not measured",
)


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """The options of this benchmark alone."""
    group.add_argument(
        "--compile", action="store_true", help="torch.compile too, which takes a minute per case"
    )


@dataclass
class _Way:
    """A way made ready. `told`: how many blocks are ours, and what is said of the others."""

    name: str
    scene: Scene
    told: Callable[[], tuple[str, tuple[str, ...]]] = lambda: ("", ())
    row: Row = field(default_factory=Row)
    times_us: list[float] = field(default_factory=list)
    walls_ms: list[float] = field(default_factory=list)


def _rows(args: argparse.Namespace, setting: Setting) -> Iterator[Row]:
    """Raises UsageError where nothing can be measured."""
    if importlib.util.find_spec("diffusers") is None:
        raise UsageError("bench models needs diffusers: `pip install diffusers`")
    from diffusers.utils import logging

    logging.set_verbosity_error()  # a model that is cast is told each time
    cases = [case for case in CASES if is_named(args.case, case.name)]
    if not cases:
        raise UsageError("no case is left")
    return _measured(cases, args, setting)


def _measured(cases: Sequence[Case], args: argparse.Namespace, setting: Setting) -> Iterator[Row]:
    makers = {EAGER: _eager, OURS: _ours, **({COMPILED: _compiled} if args.compile else {})}
    progress, plain = Countdown([1.0] * len(cases)), dict[tuple[str, str], float]()
    with tried_ahead(setting.device):
        for case in cases:
            progress.next(case.name)
            try:
                rows = _of_case(case, makers, args, setting)
            except FAILED as failure:
                rows = [Row(case=case.name, way=name, reason=why(failure)) for name in makers]
            clean(setting.device)
            eager_ms = rows[0].median
            for row in rows:
                plain[case.name, row.way] = row.median
                of_plain = row.median / plain.get((case.plain, row.way), lines.NAN)
                yield replace(row, of_eager=row.median / eager_ms, of_plain=of_plain)


Maker = Callable[[Scene], AbstractContextManager[_Way]]


@torch.no_grad()
def _of_case(
    case: Case, makers: Mapping[str, Maker], args: argparse.Namespace, setting: Setting
) -> list[Row]:
    """The rows of a case, torch's first."""
    absent = case.missing()
    if absent:
        return [Row(case=case.name, way=name, reason=absent) for name in makers]
    device = setting.device
    scene = case.scene(device, getattr(torch, args.dtype), args.small)
    right = _exact(scene)
    with ExitStack() as stack:
        ways = [
            _ready(stack, name, make, scene, case, right, device) for name, make in makers.items()
        ]
        for _ in range(setting.runs):
            for way in ways:
                _take_turn(way, device)
        return [_finished(way, device) for way in ways]


def _exact(scene: Scene) -> torch.Tensor | None:
    """The step in float32, on the CPU; None where it does not fit."""
    try:
        with no_tf32():
            return scene.in_float32().step().cpu()
    except FAILED as failure:
        if not is_out_of_memory(failure):
            raise
        return None
    finally:
        clean(scene.draw.device)


def _ready(
    stack: ExitStack,
    name: str,
    make: Maker,
    scene: Scene,
    case: Case,
    right: torch.Tensor | None,
    device: torch.device,
) -> _Way:
    """The way after its first steps, compared."""
    way = _Way(name, scene)
    row = Row(case=case.name, way=name)
    try:
        way = stack.enter_context(make(scene))
        clean(device)
        before = allocated(device)
        row = replace(row, prepare_s=wall_ms(way.scene.step, device) / 1000)
        for _ in range(WARM_UP if device.type == "cuda" else 0):
            way.scene.step()
        clean(device)
        row = replace(row, kept_mib=(allocated(device) - before) / 2**20)
        row = compared(row, way.scene.step().cpu(), right)
        peak = Peak(device)
        if device.type == "cuda":
            way.scene.step()
        row = replace(row, peak_mib=peak.mib())
    except FAILED as failure:
        row = replace(row, reason=why(failure))
    way.row = row
    return way


def _take_turn(way: _Way, device: torch.device) -> None:
    if way.row.reason:
        return

    count = STEPS if device.type == "cuda" else 1

    def steps() -> None:
        way.times_us += timed(lambda _: way.scene.step(), count, device)

    try:
        way.walls_ms.append(wall_ms(steps, device) / count)
    except FAILED as failure:
        way.row = replace(way.row, reason=why(failure))


def _finished(way: _Way, device: torch.device) -> Row:
    blocks, told = way.told()
    row = replace(way.row, blocks=blocks, told=told)
    if row.reason:
        return row
    row = replace(row, **spread(way.times_us, 1e-3), wall_ms=spread(way.walls_ms)["median"])
    return replace(row, submit_ms=submit_ms(way.scene.step, device, len(way.walls_ms)))


# -- ways -----------------------------------------------------------------------------------------


@contextmanager
def _eager(scene: Scene) -> Iterator[_Way]:
    yield _Way(EAGER, scene)


@contextmanager
def _compiled(scene: Scene) -> Iterator[_Way]:
    """Each model by torch.compile, in channels-last."""
    torch._dynamo.reset()
    own = scene.copy()
    for name, model in own.parts.items():
        model.to(memory_format=torch.channels_last)
        own.parts[name] = torch.compile(model, dynamic=False)
    try:
        yield _Way(COMPILED, own)
    finally:
        torch._dynamo.reset()


@contextmanager
def _ours(scene: Scene) -> Iterator[_Way]:
    """As hosts/diffusers serves a pipeline that has these models."""
    from lib_rocm_sd.hosts.diffusers import patched

    report = Report()
    session, own = Session.of("Auto", report=report), scene.copy()
    options: dict[str, Any] = {"unet": True, "session": session, "wait": True, "compare": False}
    with patched(SimpleNamespace(**own.parts), **options) as patch:

        def told() -> tuple[str, tuple[str, ...]]:
            nets = (patch.unet, *patch.controlnets)
            kinds = [kind for net in nets for kind in net.rows()]
            blocks = f"{sum(kind.ours for kind in kinds)} of {sum(kind.total for kind in kinds)}"
            attentions = f"attention: {patch.replaced} with a processor of ours, {patch.served} "
            left = [f"{count} x {what}" for what, count in patch.left_alone.items()]
            attentions += "; ".join(["served", *left])
            notes = [*map(str, kinds), attentions, report.summary(), *report.snapshot()["events"]]
            whole = tuple(" ".join(note.split()) for note in notes if note)
            return blocks if kinds else "", whole

        yield _Way(OURS, own, told)


def render(heading: str, rows: Sequence[Row]) -> str:
    """The table, and below it what is ours in each case and what is not."""
    text = [heading, *TEXT.lines(rows)]
    for row in rows:
        notes = (f"  {note}" for note in row.told)
        text += ["", f"{row.case}, {row.way}:", *notes] if row.told else []
    return "\n".join(text)


BENCHMARK = Benchmark(COLUMNS, _rows, render, (TURNS, QUICK_TURNS), TEXT.line)
