"""`python -m lib_rocm_sd bench vae`: every way to decode and encode, in one run."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lib_rocm_sd import checks
from lib_rocm_sd.bench.progress import Countdown, duration, say
from lib_rocm_sd.bench.vae import child, coders, measure, plot, result, text
from lib_rocm_sd.bench.vae.coders import FACTOR, ROLES, Coder
from lib_rocm_sd.bench.vae.result import VaeRow, VaeRun
from lib_rocm_sd.bench.vae.ways import KEYS, Way, chosen
from lib_rocm_sd.policy import LEVELS

SIZES = (512, 1024, 2048, 4096, 8192)
"""Pixels a side; each way has its own end."""
ENCODER_MOST, QUICK_MOST = 2048, 1024
SMALL_SIZES = (64,)
RUNS, QUICK_RUNS = 5, 3
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
            machine, rows = result.read(Path(args.source))
        except (OSError, ValueError) as error:
            print(f"--from {checks.told(args.source, error)}", file=sys.stderr)
            return 2
        status = 0
    else:
        document = VaeRun(Path(args.json) if args.json else None, machine)
        status, rows = _measured(args, device, document), document.rows
    print(text.render(heading(machine), rows))
    wrong = text.complaints(rows, machine.get("dtype", args.dtype))
    for complaint in wrong:
        print(f"wrong: {complaint}")
    if args.plot:
        Path(args.plot).write_text(plot.draw(rows, machine.get("device", "")), encoding="utf-8")
    if args.picture and status == 0:
        from lib_rocm_sd.bench.vae import picture  # needs Pillow

        with _stoppable():
            coder = coders.coder("decoder", device, getattr(torch, args.dtype), args.small)
            picture.draw(coder, Path(args.picture))
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


def _measured(args: argparse.Namespace, device: torch.device, document: VaeRun) -> int:
    """Measure into the document; 130 when interrupted, else 0."""
    try:
        with _stoppable():
            for row in rows(args, device):
                print(text.line(row), file=sys.stderr, flush=True)
                document.add(row)
    except KeyboardInterrupt:
        document.write("interrupted")
        print("interrupted: the result has the rows so far", file=sys.stderr)
        return 130
    document.write()
    return 0


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


def rows(args: argparse.Namespace, device: torch.device) -> Iterator[VaeRow]:
    """The rows, as they are measured; the compiled way's last."""
    found = chosen(args.ways, args.level)
    here = [way for way in found if args.in_process or not way.compiled]
    roles = (args.roles or ROLES) if here else ()
    progress = Countdown(
        [size**2 for role in roles for way in here for size in sizes(args, way, role)]
    )
    for role in roles:
        yield from _of_role(args, role, device, here, progress)
    if not args.in_process:
        yield from _compiled(args, device, [way for way in found if way.compiled])


def _of_role(
    args: argparse.Namespace,
    role: str,
    device: torch.device,
    ways: Sequence[Way],
    progress: Countdown,
) -> Iterator[VaeRow]:
    print(f"{role}\n{text.HEAD}", file=sys.stderr, flush=True)
    coder = coders.coder(role, device, getattr(torch, args.dtype), args.small)
    wanted = sorted({size for way in ways for size in sizes(args, way, role)})
    exact = {}
    for size in wanted:
        if size <= measure.REFERENCE_MOST:
            say(f"{role}, {size}x{size}: once in float32, to compare with")
        exact[size] = measure.exact(coder, size)
    for way in ways:
        yield from _of_way(args, coder, way, exact, progress)


def _of_way(
    args: argparse.Namespace,
    coder: Coder,
    way: Way,
    exact: dict[int, measure.Reference],
    progress: Countdown,
) -> Iterator[VaeRow]:
    fresh = FACTOR * (KEYS.index(way.key) + 1)
    asked = sizes(args, way, coder.role)
    if not asked:
        return
    try:
        with way.make(coder) as runner:
            kept_mib = measure.prepare(coder, way, runner)
            for size in asked:
                progress.next(f"{coder.role}, {size}x{size}: {way.name}")
                row = measure.measure(coder, way, runner, size, fresh, runs(args), exact[size])
                yield replace(row, kept_mib=kept_mib)
    except measure.FAILED as failure:
        for size in asked:
            yield VaeRow(coder.role, size, way.name, reason=measure.why(failure))
    finally:
        measure.clean(coder.device)


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
    return [size for size in SIZES if size <= most and not (args.quick and way.compiled)]


def _compiled(
    args: argparse.Namespace, device: torch.device, ways: Sequence[Way]
) -> Iterator[VaeRow]:
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
    yield from child.measured(options, jobs, device, args.compile_limit_s)
