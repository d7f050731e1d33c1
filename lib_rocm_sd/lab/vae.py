"""`python -m lib_rocm_sd bench vae`: every way to decode and encode, in one run.

The compiled way has a process of its own, so that it cannot hold up or end the run.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import lib_rocm_sd
from lib_rocm_sd import checks
from lib_rocm_sd.catalog.unet import FACTOR
from lib_rocm_sd.lab import models, vae_plot, vae_ways
from lib_rocm_sd.lab.models import ROLES, Coder, Way
from lib_rocm_sd.lab.rows import (
    OURS,
    Columns,
    Countdown,
    Result,
    Row,
    TextTable,
    between,
    duration,
    field,
    read,
    say,
)
from lib_rocm_sd.lab.timing import FAILED, clean, why
from lib_rocm_sd.lab.vae_ways import KEYS, WAYS, Reference, chosen, exact, measure, prepare
from lib_rocm_sd.policy import LEVELS
from lib_rocm_sd.runtime import process

SIZES = (512, 1024, 2048, 4096, 8192)
"""Pixels a side; each way has its own end."""
ENCODER_MOST, QUICK_MOST = 2048, 1024
SMALL_SIZES = (64,)
RUNS, QUICK_RUNS = 5, 3
SCHEMA = 2
REFUSAL = "no result of `bench vae`"
COMPILE_LIMIT_S = 100.0
LARGEST = 1 << 16


def add_arguments(parser: argparse._ActionsContainer, other_ways: Sequence[str] = ()) -> None:
    """The options of `bench vae`; `other_ways`: those of `bench unet`, which has --ways too."""
    add = parser.add_argument
    ways = [*KEYS, *(key for key in other_ways if key not in KEYS)]
    add("--ways", nargs="+", choices=ways, metavar="WAY", help=f"only these: {', '.join(ways)}")
    add("--level", nargs="+", choices=list(LEVELS), help="of our ways only these levels")
    add("--roles", nargs="+", choices=ROLES, help="only these")
    add("--sizes", nargs="+", type=int, metavar="PIXELS", help="a side, of all ways")
    add(
        "--compile-limit-s",
        type=float,
        default=COMPILE_LIMIT_S,
        help="how long torch.compile may take altogether (default %(default)s)",
    )
    add("--in-process", action="store_true", help=argparse.SUPPRESS)
    add("--picture", metavar="FILE", help="draw how bands and tilings differ from the whole frame")


def run(
    args: argparse.Namespace,
    device: torch.device,
    machine: dict[str, Any],
    heading: Callable[[dict[str, Any]], str],
) -> int:
    """Measure, print, write. 1 if ours was wrong, 2 on bad options, 130 when interrupted."""
    refusal = _refusal(args)
    if refusal:
        print(refusal, file=sys.stderr)
        return 2
    if args.source:
        try:
            result, status = read(Path(args.source), COLUMNS, REFUSAL), 0
        except (OSError, ValueError) as error:
            print(f"--from {checks.told(args.source, error)}", file=sys.stderr)
            return 2
    else:
        result = VaeResult(COLUMNS, machine, args.json)
        with _stoppable():
            status = result.collect(_rows(args, device), TEXT.line)
    machine, rows = result.machine, result.rows
    print(render(heading(machine), rows))
    wrong = complaints(rows, machine.get("dtype", args.dtype))
    for complaint in wrong:
        print(f"wrong: {complaint}")
    if args.plot:
        Path(args.plot).write_text(vae_plot.draw(rows, machine.get("device", "")), encoding="utf-8")
    if args.picture and status == 0:
        with _stoppable():
            coder = models.coder("decoder", device, getattr(torch, args.dtype), args.small)
            vae_plot.picture(coder, Path(args.picture))
    return status or int(bool(wrong))


def _refusal(args: argparse.Namespace) -> str:
    """Why these options cannot be followed; empty if they can."""
    measures = not args.source
    if (measures or args.picture) and importlib.util.find_spec("diffusers") is None:
        return "bench vae needs diffusers: `pip install diffusers`"
    if args.picture and importlib.util.find_spec("PIL") is None:
        return "--picture needs Pillow: `pip install pillow`"
    for size in args.sizes or ():
        if not 0 < size <= LARGEST or size % FACTOR:
            return f"--sizes: {size} is not a multiple of {FACTOR} between {FACTOR} and {LARGEST}"
    if not args.compile_limit_s > 0:
        return f"--compile-limit-s: {args.compile_limit_s} is not above 0"
    if measures and not chosen(args.ways, args.level):
        return "no way is left: --level chooses among ours"
    return ""


class VaeResult(Result):
    """Rows by role and size. The file says that it is not complete until it is, and why."""

    def end(self, incomplete: str = "") -> None:
        """Write; `incomplete` says why there are not more rows."""
        self.rows = ordered(self.rows)
        self.write(SCHEMA, complete=not incomplete, incomplete=incomplete)


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM is an interrupt: what was started is ended, what was measured is kept."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _rows(args: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """The rows, as they are measured; the compiled way's last."""
    every = chosen(args.ways, args.level)
    here = [way for way in every if args.in_process or not way.slow]
    roles = (args.roles or ROLES) if here else ()
    progress = Countdown(
        [size**2 for role in roles for way in here for size in sizes(args, way, role)]
    )
    for role in roles:
        say(f"{role}\n{TEXT.head}")
        coder = models.coder(role, device, getattr(torch, args.dtype), args.small)
        references = {}
        for size in sorted({size for way in here for size in sizes(args, way, role)}):
            if size <= vae_ways.REFERENCE_MOST:
                say(f"{role}, {size}x{size}: once in float32, to compare with")
            references[size] = exact(coder, size)
        for way in here:
            yield from _of_way(args, coder, way, references, progress)
    if not args.in_process:
        yield from _compiled(args, device, [way for way in every if way.slow])


def _of_way(
    args: argparse.Namespace,
    coder: Coder,
    way: Way,
    references: dict[int, Reference],
    progress: Countdown,
) -> Iterator[Row]:
    fresh = FACTOR * (KEYS.index(way.key) + 1)
    asked = sizes(args, way, coder.role)
    if not asked:
        return
    try:
        with way.make(coder) as runner:
            kept_mib = prepare(coder, way, runner)
            for size in asked:
                progress.next(f"{coder.role}, {size}x{size}: {way.name}")
                row = measure(coder, way, runner, size, fresh, runs(args), references[size])
                yield replace(row, kept_mib=kept_mib)
    except FAILED as failure:
        for size in asked:
            yield Row(role=coder.role, size=size, way=way.name, reason=why(failure))
    finally:
        clean(coder.device)


def runs(args: argparse.Namespace) -> int:
    """Timed runs per row."""
    return args.runs or (QUICK_RUNS if args.quick else RUNS)


def sizes(args: argparse.Namespace, way: Way, role: str) -> list[int]:
    """The sizes of a way: those asked for, or its usual ones."""
    if args.sizes:
        return list(dict.fromkeys(args.sizes))
    if args.small:
        return list(SMALL_SIZES)
    most = min(way.most, ENCODER_MOST if role == "encoder" else way.most)
    most = min(most, QUICK_MOST) if args.quick else most
    return [size for size in SIZES if size <= most and not (args.quick and way.slow)]


def _compiled(args: argparse.Namespace, device: torch.device, ways: Sequence[Way]) -> Iterator[Row]:
    """The compiled way's rows, from a process of its own."""
    jobs = [
        (role, size)
        for way in ways
        for role in args.roles or ROLES
        for size in sizes(args, way, role)
    ]
    if not jobs:
        return
    say(f"torch.compile: {duration(args.compile_limit_s)} at most")
    options = ["--device", str(device), "--dtype", args.dtype, "--runs", str(runs(args))]
    options += ["--roles", *(args.roles or ROLES)] + ["--small"] * args.small
    options += ["--sizes", *(str(size) for size in args.sizes)] if args.sizes else []
    yield from compiled_rows(options, jobs, device, args.compile_limit_s)


# -- the compiled way -----------------------------------------------------------------------------


COMPILED = next(way.name for way in WAYS if way.slow)
POLL_S = 0.5
COMPILERS = ("c++", "g++", "clang++", "cl")
RoleAndSize = tuple[str, int]
"""A role and a size."""


def why_not_compiled(device: torch.device) -> list[str]:
    """Why torch.compile cannot be tried; empty if it can."""
    if not hasattr(torch, "compile"):
        return [f"torch {torch.__version__} has no torch.compile"]
    if importlib.util.find_spec("torch._inductor") is None:
        return ["this torch has no inductor"]
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return ["triton is not installed"]
    compiler = os.environ.get("CXX") or any(shutil.which(name) for name in COMPILERS)
    return [] if device.type != "cpu" or compiler else ["there is no C++ compiler"]


def compiled_rows(
    options: Sequence[str], jobs: Sequence[RoleAndSize], device: torch.device, limit_s: float
) -> Iterator[Row]:
    """The rows of the compiled way for all `jobs`, by `bench vae` with these options.

    Given as they come. What is not there after `limit_s` is a row with that reason.
    """
    why = why_not_compiled(device)
    if why:
        yield from (_without(job, "; ".join(why)) for job in jobs)
        return
    missing = list(jobs)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "lib_rocm_sd", "bench", "vae", "--in-process"]
        command += [*options, "--ways", "compiled", "--json", str(file)]
        ended = ""
        for state in watched(command, limit_s, Path(folder) / "log"):
            ended = state
            for row in rows_of(file):
                if (row.role, row.size) in missing:
                    missing.remove((row.role, row.size))
                    yield row
    yield from (_without(job, ended) for job in missing)


def rows_of(file: Path) -> list[Row]:
    """The rows in a result; none while it is not there."""
    try:
        return read(file, COLUMNS, REFUSAL).rows
    except (OSError, ValueError):
        return []


def watched(command: Sequence[str], limit_s: float, log: Path) -> Iterator[str]:
    """Run a command in a process group of its own; "" now and then, at last how it ended."""
    root = Path(lib_rocm_sd.__file__).parent.parent
    end = time.monotonic() + limit_s
    with log.open("wb") as messages:
        child = subprocess.Popen(
            command,
            cwd=root,
            stdout=subprocess.DEVNULL,
            stderr=messages,
            start_new_session=os.name == "posix",
        )
        try:
            while child.poll() is None:
                if time.monotonic() > end:
                    yield f"not compiled and timed within {limit_s:.0f} s"
                    return
                time.sleep(POLL_S)
                yield ""
        finally:
            if child.poll() is None:  # its helpers are ended with it
                process.kill(child)
                child.wait()
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    yield f"its process ended with status {child.returncode}: {(lines or [''])[-1]}"


def _without(job: RoleAndSize, reason: str) -> Row:
    return Row(role=job[0], size=job[1], way=COMPILED, reason=reason)


# -- text -----------------------------------------------------------------------------------------


EAGER = "eager"
STEPS_MOST, SHARE_MOST = 1, 1e-4
"""How far bands may be from the whole frame: in 1/255 steps, and the share of differing values."""
FLOOR = {"float16": 0.01, "bfloat16": 0.08}
"""An error of ours up to this is not asked about."""

COLUMNS = Columns(
    "role size way runs median_ms=median p10_ms=p10 p90_ms=p90 ms_per_megapixel first_at "
    "first_ms second_ms first_ratio compile_s peak_mib kept_mib error shift reference steps "
    "steps_share plan ran reason note",
    ("size", "way"),
)
TEXT = TextTable(
    (field("pixels", 6, "size"), field("way", -26, "way")),
    (
        field("ms", 9, "median", ".1f"),
        between(17),
        field("ms/MP", 8, "ms_per_megapixel", ".1f"),
        field("first", 9, "first_ms", ".1f"),
        field("/2nd", 6, "first_ratio", ".2f"),
        field("peak MiB", 9, "peak_mib", ".0f"),
        field("error", 8, "error", ".1e"),
        field("shift", 8, "shift", ".1e"),
    ),
    lambda row: f"  {'; '.join(_notes(row))}",
    absent="not measured",
    head_tail="  plan",
)


def _notes(row: Row) -> Iterator[str]:
    yield from [row.plan] if row.plan else []
    if not math.isnan(row.compile_s):
        yield f"compiled in {row.compile_s:.0f} s"
    if not math.isnan(row.steps):
        yield f"{row.steps:.0f}/255 on {row.steps_share:.4%} beside the whole frame"
    yield from [row.note] if row.note else []


def ordered(rows: Sequence[Row]) -> list[Row]:
    """By role and size; ways stay as they came."""
    return sorted(rows, key=lambda row: (row.role, row.size))


def render(heading: str, rows: Sequence[Row]) -> str:
    """All rows, a table per role."""
    lines = [f"{heading}; Stable Diffusion's VAE with random weights, batch 1"]
    for role in dict.fromkeys(row.role for row in ordered(rows)):
        lines += ["", role, *TEXT.lines([row for row in ordered(rows) if row.role == role])]
    return "\n".join(lines)


def complaints(rows: Sequence[Row], dtype: str) -> list[str]:
    """What is wrong with rows of ours: values, or bands that differ from the whole frame."""
    wrong = []
    for row in rows:
        if not row.way.startswith(OURS):
            continue
        where = f"{row.role} {row.size} {row.way}"
        beside = (other for other in rows if (other.role, other.size) == (row.role, row.size))
        eager = next((other.error for other in beside if other.way == EAGER), math.nan)
        most = max(FLOOR[dtype], 0.0 if math.isnan(eager) else 2 * eager)
        if row.reason.startswith("wrong"):
            wrong.append(f"{where}: {row.reason}")
        if row.error > most:
            wrong.append(f"{where}: error {row.error:.1e}, at most {most:.1e} is right")
        if row.steps > STEPS_MOST or row.steps_share > SHARE_MOST:
            far = f"{row.steps:.0f}/255 on {row.steps_share:.4%} of the values"
            wrong.append(f"{where}: bands differ from the whole frame by {far}")
    return wrong
