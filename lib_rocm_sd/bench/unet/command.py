"""`python -m lib_rocm_sd bench unet`: every way to run a UNet's step, in one run."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd.bench.progress import Countdown, say
from lib_rocm_sd.bench.rows import as_json, is_named
from lib_rocm_sd.bench.unet import measure, models
from lib_rocm_sd.bench.unet.measure import UnetRow
from lib_rocm_sd.bench.unet.models import CASES, SMALL_CASES, Case, Unet
from lib_rocm_sd.bench.unet.ways import WAYS, Way

RUNS, QUICK_RUNS = 7, 3


def runs(args: argparse.Namespace) -> int:
    """Timings of a row."""
    return args.runs or (QUICK_RUNS if args.quick else RUNS)


def run(
    args: argparse.Namespace,
    device: torch.device,
    machine: dict[str, Any],
    heading: Callable[[dict[str, Any]], str],
) -> int:
    """Measure, print a table, write JSON. 1 if ours was wrong, 2 on bad options."""
    if importlib.util.find_spec("diffusers") is None:
        print("bench unet needs diffusers: `pip install diffusers`", file=sys.stderr)
        return 2
    cases, ways = _cases(args), _ways(args)
    if not cases or not ways:
        print("bench unet: no case or no way is left", file=sys.stderr)
        return 2
    rows: list[UnetRow] = []
    interrupted = False
    try:
        for row in _rows(cases, ways, device, getattr(torch, args.dtype), runs(args)):
            say(line(row))
            rows.append(row)
            _write(args.json, machine, rows, complete=False)
    except KeyboardInterrupt:
        interrupted = True
    _write(args.json, machine, rows, complete=not interrupted)
    print(render(heading(machine), rows))
    if interrupted:
        print("interrupted: the result has the rows so far", file=sys.stderr)
        return 130
    return int(
        any(row.reason.startswith("wrong") and row.way.startswith("rocm_sd") for row in rows)
    )


def _cases(args: argparse.Namespace) -> list[Case]:
    found = SMALL_CASES if args.small else CASES[:1] if args.quick else CASES
    return [case for case in found if is_named(args.case, str(case))]


def _ways(args: argparse.Namespace) -> list[Way]:
    """All; without those that compile for a minute where the run is to be short."""
    if args.ways:
        return [way for way in WAYS if way.key in args.ways]
    return [way for way in WAYS if not (way.slow and (args.quick or args.small))]


def _rows(
    cases: Sequence[Case], ways: Sequence[Way], device: torch.device, dtype: torch.dtype, runs: int
) -> Iterator[UnetRow]:
    progress = Countdown([1.0] * (len(cases) * len(ways)))
    for model in dict.fromkeys(case.model for case in cases):
        unet = models.unet(model, device, dtype)
        own = [case for case in cases if case.model == model]
        exact = {case: measure.exact(unet, case) for case in own}
        for way in ways:
            for place, case in enumerate(own):
                progress.next(f"{case}: {way.name}")
                if way.slow and place:
                    why = f"compiled for {own[0]} only: it takes a minute for each size"
                    yield UnetRow(str(case), way.name, reason=why)
                    continue
                yield _row(unet, case, way, runs, exact[case])
        del unet
        measure.clean(device)


def _row(unet: Unet, case: Case, way: Way, runs: int, exact: torch.Tensor | None) -> UnetRow:
    try:
        with way.make(unet) as runner:
            return measure.measure(unet, case, way, runner, runs, exact)
    except measure.FAILED as failure:
        return UnetRow(str(case), way.name, reason=measure.reason_of(failure))


def _write(
    path: str | None, machine: dict[str, Any], rows: Sequence[UnetRow], complete: bool
) -> None:
    if path:
        document = {"machine": machine, "complete": complete, "rows": [*map(as_json, rows)]}
        Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


HEAD = (
    f"{'case':<16} {'way':<24} {'wall ms':>8} {'p10..p90':>15} {'GPU ms':>8} {'submit':>7} "
    f"{'launches':>8} {'first':>8} {'second':>8} {'MiB':>6} {'kept':>6} {'error':>8} {'rms':>8}"
)


def line(row: UnetRow) -> str:
    """A row of the table."""
    begin = f"{row.case:<16} {row.way:<24}"
    if row.reason:
        return f"{begin} not measured: {row.reason}"
    shown = replace(row, told=())
    numbers = {
        name: "-" if isinstance(value, float) and math.isnan(value) else value
        for name, value in vars(shown).items()
    }

    def fixed(name: str, digits: int) -> str:
        value = numbers[name]
        return value if isinstance(value, str) else f"{value:.{digits}f}"

    spread = f"{fixed('p10_ms', 2)}..{fixed('p90_ms', 2)}"
    errors = [f"{value:.1e}" if not math.isnan(value) else "-" for value in (row.error, row.rms)]
    return (
        f"{begin} {fixed('wall_ms', 2):>8} {spread:>15} {fixed('gpu_ms', 2):>8} "
        f"{fixed('submit_ms', 2):>7} {row.launches:>8} {fixed('first_ms', 1):>8} "
        f"{fixed('second_ms', 1):>8} {fixed('peak_mib', 0):>6} {fixed('kept_mib', 0):>6} "
        f"{errors[0]:>8} {errors[1]:>8}"
    )


def render(heading: str, rows: Sequence[UnetRow]) -> str:
    """The table that a person reads, and below it what was not ours and why."""
    lines = [heading, HEAD, *map(line, rows)]
    told = {(row.case, row.way): row.told for row in rows if row.told}
    for (case, way), notes in told.items():
        lines += ["", f"{case}, {way}:", *(f"  {note}" for note in notes)]
    return "\n".join(lines)
