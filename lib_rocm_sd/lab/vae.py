"""`python -m lib_rocm_sd bench vae`: every way to decode and encode, in one run."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from lib_rocm_sd.catalog.unet import FACTOR
from lib_rocm_sd.checks import UsageError
from lib_rocm_sd.lab import models, svg, vae_ways
from lib_rocm_sd.lab.benchmark import Benchmark, Setting
from lib_rocm_sd.lab.models import ROLES, Coder, Way
from lib_rocm_sd.lab.rows import (
    OURS,
    Columns,
    Countdown,
    Result,
    Row,
    TextTable,
    between,
    field,
    say,
)
from lib_rocm_sd.lab.timing import FAILED, clean, why
from lib_rocm_sd.lab.vae_ways import KEYS, WAYS, Reference, exact, measure, prepare

SIZES = (512, 1024, 2048, 4096, 8192)
"""Pixels a side; each way has its own end."""
ENCODER_MOST, QUICK_MOST = 2048, 1024
SMALL_SIZES = (64,)
RUNS, QUICK_RUNS = 5, 3
COMPILE_LIMIT_S = 100.0
"""No size is compiled after that time of torch.compile."""
LARGEST = 1 << 16


def add_arguments(parser: argparse._ActionsContainer, other_ways: Sequence[str] = ()) -> None:
    """The options of `bench vae`; `other_ways`: those of `bench unet`, which has --ways too."""
    add = parser.add_argument
    ways = [*KEYS, *(key for key in other_ways if key not in KEYS)]
    add("--ways", nargs="+", choices=ways, metavar="WAY", help=f"only these: {', '.join(ways)}")
    add("--roles", nargs="+", choices=ROLES, help="only these")
    add("--sizes", nargs="+", type=int, metavar="PIXELS", help="a side, of all ways")


def _rows(args: argparse.Namespace, setting: Setting) -> Iterator[Row]:
    """The rows, as they are measured. Raises UsageError where these options cannot be followed."""
    if importlib.util.find_spec("diffusers") is None:
        raise UsageError("bench vae needs diffusers: `pip install diffusers`")
    for size in args.sizes or ():
        if not 0 < size <= LARGEST or size % FACTOR:
            what = f"{size} is not a multiple of {FACTOR} between {FACTOR} and {LARGEST}"
            raise UsageError(f"--sizes: {what}")
    ways = [way for way in vae_ways.WAYS if not args.ways or way.key in args.ways]
    if not ways:
        raise UsageError(f"--ways: bench vae has {', '.join(KEYS)}")
    return _measured(args, ways, setting)


def _measured(args: argparse.Namespace, ways: Sequence[Way], setting: Setting) -> Iterator[Row]:
    roles = args.roles or ROLES
    progress = Countdown(
        [size**2 for role in roles for way in ways for size in sizes(args, way, role)]
    )
    compiling_s = 0.0
    for role in roles:
        say(f"{role}\n{TEXT.head}")
        coder = models.coder(role, setting.device, getattr(torch, args.dtype), args.small)
        references = {}
        for size in sorted({size for way in ways for size in sizes(args, way, role)}):
            if size <= vae_ways.REFERENCE_MOST:
                say(f"{role}, {size}x{size}: once in float32, to compare with")
            references[size] = exact(coder, size)
        for way in ways:
            begin = time.monotonic()
            right = {size: references[size] for size in sizes(args, way, role)}
            yield from _of_way(coder, way, right, setting.runs, progress, begin - compiling_s)
            compiling_s += (time.monotonic() - begin) * way.slow


def _of_way(
    coder: Coder,
    way: Way,
    references: dict[int, Reference],
    runs: int,
    progress: Countdown,
    since: float,
) -> Iterator[Row]:
    """A row for each size that there is a reference of. Where the way compiles, no size is begun
    after the limit, which counts from `since`.
    """
    fresh = FACTOR * (KEYS.index(way.key) + 1)
    rest = {size: Row(role=coder.role, size=size, way=way.name) for size in references}
    lacking = why_not_compiled(coder.device) if way.slow else []
    if lacking or not rest:
        yield from (replace(row, reason="; ".join(lacking)) for row in rest.values())
        return
    try:
        with way.make(coder) as runner:
            kept_mib = prepare(coder, way, runner)
            for size, reference in references.items():
                progress.next(f"{coder.role}, {size}x{size}: {way.name}")
                row = rest.pop(size)
                if way.slow and time.monotonic() - since > COMPILE_LIMIT_S:
                    late = f"not compiled and timed within {COMPILE_LIMIT_S:.0f} s"
                    yield replace(row, reason=late)
                else:
                    row = measure(coder, way, runner, size, fresh, runs, reference)
                    yield replace(row, kept_mib=kept_mib)
    except FAILED as failure:
        yield from (replace(row, reason=why(failure)) for row in rest.values())
    finally:
        clean(coder.device)


def sizes(args: argparse.Namespace, way: Way, role: str) -> list[int]:
    """The sizes of a way: those asked for, or its usual ones."""
    if args.sizes:
        return list(dict.fromkeys(args.sizes))
    if args.small:
        return list(SMALL_SIZES)
    most = min(way.most, ENCODER_MOST if role == "encoder" else way.most)
    most = min(most, QUICK_MOST) if args.quick else most
    return [size for size in SIZES if size <= most and not (args.quick and way.slow)]


COMPILERS = ("c++", "g++", "clang++", "cl")


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


def by_size(rows: Sequence[Row]) -> list[Row]:
    """By role and size; ways stay as they came."""
    return sorted(rows, key=lambda row: (row.role, row.size))


def render(heading: str, rows: Sequence[Row]) -> str:
    """All rows, a table per role."""
    lines = [f"{heading}; Stable Diffusion's VAE with random weights, batch 1"]
    for role in dict.fromkeys(row.role for row in by_size(rows)):
        lines += ["", role, *TEXT.lines([row for row in by_size(rows) if row.role == role])]
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


def draw(rows: Sequence[Row], device: str) -> str:
    """Bars as SVG: of each size a decode's time, and its peak memory over the weights."""
    bars = []
    for row in by_size([row for row in rows if row.role == ROLES[0] and not row.reason]):
        size = f"{row.size}x{row.size}"
        bars.append(replace(row, case=f"{size}: time"))
        if math.isfinite(row.peak_mib):
            memory = replace(row, unit="MiB", median=row.peak_mib, p10=math.nan, p90=math.nan)
            bars.append(replace(memory, case=f"{size}: peak memory"))
    return (
        svg.chart(f"VAE, a decode on {device}: less is better", bars, WAYS[0].name, limits={})
        + "\n"
    )


def _is_wrong(result: Result) -> bool:
    wrong = complaints(result.rows, result.machine.get("dtype", "float16"))
    for complaint in wrong:
        print(f"wrong: {complaint}")
    return bool(wrong)


BENCHMARK = Benchmark(
    COLUMNS,
    _rows,
    render,
    (RUNS, QUICK_RUNS),
    TEXT.line,
    _is_wrong,
    draw,
)
