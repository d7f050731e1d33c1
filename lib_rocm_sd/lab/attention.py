"""`bench attention`: every way to run what Stable Diffusion asks for, ours and all that users could
pick instead, each timed only once it is right.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from dataclasses import field as data
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd import checks
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.engine.measure import NumberedCall, input_sets, queued, timed
from lib_rocm_sd.engine.selftest import FAILURES, is_out_of_memory
from lib_rocm_sd.lab import svg, timing
from lib_rocm_sd.lab.methods import ALLOWANCE, METHODS, AmdLoops, Exact, expected
from lib_rocm_sd.lab.rows import (
    OURS,
    Column,
    Columns,
    Countdown,
    Result,
    Row,
    TextTable,
    field,
    is_named,
    is_wrong,
    none_named,
    read,
    say,
    spread,
)
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import CASES, ODD, AttentionProblem, Case
from lib_rocm_sd.ops.base import Call, KernelSpec, Launch, Variant
from lib_rocm_sd.report import config_fields

RUNS, QUICK_RUNS = 50, 10
ROW_S, QUICK_ROW_S = 0.6, 0.1
QUICK_CPU_FLOPS = 2e9
"""Larger problems take minutes on a CPU: --quick leaves them out there."""
CASE_FLOPS = {"cuda": 1e13, "cpu": 1e8}
"""What a case takes beside its arithmetic, as arithmetic: for the estimate of the time left."""
DTYPES = ("float16", "bfloat16")
SDPA, FLASH = "sdpa", "sdpa flash"
"""Names of the ways that ratios are given of."""
ROUNDS = 3
"""All variants are timed in turn, so many times, so that a clock that sinks sinks for all."""
LEAST_RUNS = 3
SHORT_US = 400.0
"""Calls up to this length are also timed waited for."""
CLEAN_BYTES = 4 << 30
MOST_TIMES = 5.0
"""A bar ends at so many times ours; its figure tells the rest."""
ALL: tuple[Variant[AttentionProblem, AttentionInputs], ...] = (
    *(variant for variant in ATTENTION.variants if variant.ours),
    AmdLoops(),
    *(variant for variant in ATTENTION.every if not variant.ours),
    *METHODS,
)
"""Ours, then what else a user could pick."""
COLUMNS = Columns(
    "label=case problem variant=way config median_us=median p10_us=p10 p90_us=p90 runs waiting_us "
    "tflops error checked_rows extra_bytes reason",
    ("case", "problem", "way"),
)
"""`median_us`, `p10_us`, `p90_us`: of the device, which found the next call queued. `waiting_us`:
the median where it had to wait for each call, so the CPU's time where that is longer.
"""

Problems = list[tuple[str, AttentionProblem]]


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """The options of `bench attention` alone."""
    add = parser.add_argument
    add("--variant", action="append", metavar="TEXT", help="only variants with this in their name")
    add("--configs", action="store_true", help="every config of ours, not only what Auto takes")


def run(
    args: argparse.Namespace,
    device: torch.device,
    info: DeviceInfo,
    launch: Launch | None,
    machine: dict[str, Any],
    heading: Callable[[dict[str, Any]], str],
) -> int:
    """Measure, print, write. 1 if ours was wrong, 2 on bad options."""
    refusal = _refusal(args, device)
    if refusal:
        print(refusal, file=sys.stderr)
        return 2
    if args.source:
        try:
            refusal = "it is no result of bench attention: {error}"
            result = read(Path(args.source), COLUMNS, refusal)
        except (OSError, ValueError) as error:
            print(f"--from {checks.told(args.source, error)}", file=sys.stderr)
            return 2
    else:
        result = Result(COLUMNS, machine, args.json)
        chosen, effort = problems(args, device), _effort(args)
        _compile(chosen, info, launch, effort)
        besides = CASE_FLOPS["cuda" if device.type == "cuda" else "cpu"]
        progress = Countdown([besides + problem.flops for _, problem in chosen])
        for label, problem in chosen:
            progress.next(f"{label}: {problem}")
            result.rows += measure(label, problem, device, info, launch, effort)
            result.write(complete=False)
        result.write(complete=True)
    print(render(heading(result.machine), result.rows))
    if args.plot:
        name = str(result.machine.get("device", ""))
        Path(args.plot).write_text(draw(result.rows, name), encoding="utf-8")
    return int(is_wrong([row for row in result.rows if row.way == OURS]))


def _refusal(args: argparse.Namespace, device: torch.device) -> str:
    """Why these options cannot be followed; empty if they can."""
    if not args.source and not problems(args, device):
        return none_named(args.case)
    if not any(_effort(args).wants(variant.name) for variant in ALL):
        names = ", ".join(variant.name for variant in ALL)
        return f"--variant: none of {names} has {' or '.join(args.variant)} in its name"
    return ""


def problems(args: argparse.Namespace, device: torch.device) -> Problems:
    """Label and problem of what is asked for, one dtype after the other."""
    if args.small:
        every = [(f"odd {number}", problem) for number, problem in enumerate(ODD, 1)]
    else:
        every = [
            (case.name, replace(case.problem, dtype=dtype))
            for dtype in dict.fromkeys(args.dtype or DTYPES[: 1 if args.quick else None])
            for case in CASES
            if args.case or not args.quick or _quick(case, device)
        ]
    return [
        (label, problem) for label, problem in every if is_named(args.case, f"{label} {problem}")
    ]


def _quick(case: Case, device: torch.device) -> bool:
    """Whether a case is measured with --quick, unless --case names it."""
    return case.usual and (device.type != "cpu" or case.problem.flops <= QUICK_CPU_FLOPS)


@dataclass(frozen=True)
class AttentionEffort:
    """`runs`: most timed calls of a row; fewer where they take more than `row_s` together.

    `every_config`: of ours, not only what Auto takes. `names`: of variants, parts of them; () is
    all.
    """

    runs: int = 50
    row_s: float = 0.6
    every_config: bool = False
    names: tuple[str, ...] = ()

    def wants(self, name: str) -> bool:
        """True for a variant that is to be measured."""
        return not self.names or any(part.lower() in name.lower() for part in self.names)

    def configs(self, variant: Variant[Any, Any], info: DeviceInfo, problem: Any) -> Sequence[Any]:
        """What is measured of a variant that takes the problem."""
        every = variant.configs(info.arch, problem)
        return every[:1] if variant.ours and not self.every_config else every


def _effort(args: argparse.Namespace) -> AttentionEffort:
    row_s = QUICK_ROW_S if args.quick else ROW_S
    return AttentionEffort(args.runs, row_s, args.configs, tuple(args.variant or ()))


def _compile(
    chosen: Problems, info: DeviceInfo, launch: Launch | None, effort: AttentionEffort
) -> None:
    """All kernels at once, several at a time; a failure is told by the launch."""
    build = getattr(launch, "build", None)
    if build is None or info.arch is None:
        return
    specs: dict[KernelSpec, None] = {}
    for _, problem in chosen:
        for variant in ALL:
            if not variant.ours or variant.refusals(info.arch, problem):
                continue
            if not effort.wants(variant.name):
                continue
            for config in effort.configs(variant, info, problem):
                specs.update(dict.fromkeys(variant.specs(info.arch, problem, config)))
    say(f"{len(specs)} kernels are needed; what is not compiled yet is compiled now")
    build(list(specs))


# -- measuring ------------------------------------------------------------------------------------


@dataclass
class _Entry:
    """A variant with one config under measurement; its row is final once it has a reason.

    `run`: as the engine calls it for these inputs.
    """

    row: Row
    variant: Variant[AttentionProblem, AttentionInputs]
    config: Any
    launch: Launch | None
    run: Callable[..., torch.Tensor]
    submit_s: float = 0.0
    round_runs: int = 0
    times: list[float] = data(default_factory=list)
    waiting: list[float] = data(default_factory=list)

    def output(self, problem: AttentionProblem, inputs: AttentionInputs) -> torch.Tensor:
        return self.run(Call(problem, inputs, self.launch, self.config))


def measure(
    label: str,
    problem: AttentionProblem,
    device: torch.device,
    info: DeviceInfo,
    launch: Launch | None,
    effort: AttentionEffort,
) -> list[Row]:
    """One row per variant, each verified against float64 before it is timed.

    Of ours with several configs the first, which Auto takes, or all; of others' the fastest.
    """
    start = Row(case=label, problem=asdict(problem))
    with torch.no_grad():
        entries = list(_entries(start, problem, info, launch, effort))
        try:
            sets = rotating_inputs(problem, device)
            exact = expected(sets[0], problem)
        except FAILURES as failure:
            said = f"inputs and reference: {_why(failure, problem)}"
            return [replace(each.row, reason=each.row.reason or said) for each in entries]
        ready = [each for each in entries if not each.row.reason]
        for each in ready:
            _verify(each, sets, exact, problem, effort)
            failed_or_large = each.row.reason or (each.row.extra_bytes or 0) > CLEAN_BYTES
            if device.type == "cuda" and failed_or_large:  # others may need its memory
                timing.clean(device)
        for _ in range(ROUNDS):
            for each in ready:
                _round(each, sets, problem)
    return fastest([_finished(each, problem) for each in entries])


def _entries(
    start: Row,
    problem: AttentionProblem,
    info: DeviceInfo,
    launch: Launch | None,
    effort: AttentionEffort,
) -> Iterator[_Entry]:
    for variant in ALL:
        if not effort.wants(variant.name):
            continue
        row = replace(start, way=variant.name)
        refusals = variant.refusals(info.arch, problem)
        if not refusals and variant.ours and launch is None:
            refusals = list(info.reasons) or ["there is no launcher"]
        if refusals:
            row = replace(row, reason="; ".join(refusals))
            yield _Entry(row, variant, None, None, variant.run)
            continue
        for config in effort.configs(variant, info, problem):
            shown = replace(row, config=config_fields(config))
            yield _Entry(shown, variant, config, launch if variant.ours else None, variant.run)


def rotating_inputs(problem: AttentionProblem, device: torch.device) -> list[AttentionInputs]:
    """As (batch, seq, heads*head_dim) in different memory, more of it than the cache has."""
    return input_sets(
        ATTENTION, problem, device, lambda size_bytes: timing.sets_needed(size_bytes, device)
    )


def _call(
    entry: _Entry, sets: Sequence[AttentionInputs], problem: AttentionProblem
) -> NumberedCall:
    return lambda number: entry.output(problem, sets[number % len(sets)])


def _verify(
    entry: _Entry,
    sets: Sequence[AttentionInputs],
    exact: Exact,
    problem: AttentionProblem,
    effort: AttentionEffort,
) -> None:
    """Compare with float64, note the memory, warm up and decide on the number of runs."""
    device, call = sets[0][0].device, _call(entry, sets, problem)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            entry.run = entry.variant.bound(Call(problem, sets[0], entry.launch, entry.config))
            call(0)  # compile, load, allocate workspaces of libraries
        out, extra_bytes = _held(entry, problem, sets[0])
        error = exact.error(out)
        del out
        entry.row = replace(
            entry.row, error=error, checked_rows=exact.rows, extra_bytes=extra_bytes
        )
        allowance = ALLOWANCE if entry.variant in METHODS else 1.0
        if not error <= allowance * ATTENTION.tolerance(problem):
            entry.row = replace(entry.row, reason=f"wrong: error {error:.1e}")
            return
        entry.submit_s = timing.warm_up(call, device)
        once_us = min(timed(call, 2, device))
        runs = min(effort.runs, max(int(1e6 * effort.row_s / max(once_us, 1e-3)), LEAST_RUNS))
        entry.round_runs = -(-runs // ROUNDS)
        if once_us <= SHORT_US and device.type == "cuda":
            entry.waiting = timed(call, runs, device)
    except FAILURES as failure:
        entry.row = replace(entry.row, reason=_why(failure, problem, said))


def _round(entry: _Entry, sets: Sequence[AttentionInputs], problem: AttentionProblem) -> None:
    if entry.row.reason:
        return
    device, call = sets[0][0].device, _call(entry, sets, problem)
    try:
        queued(call, min(entry.round_runs, 3), device, entry.submit_s)
        entry.times += queued(call, entry.round_runs, device, entry.submit_s)
    except FAILURES as failure:
        entry.row = replace(entry.row, reason=_why(failure, problem))


def _finished(entry: _Entry, problem: AttentionProblem) -> Row:
    if entry.row.reason:
        return entry.row
    waiting_us = statistics.median(entry.waiting) if entry.waiting else math.nan
    row = replace(entry.row, **spread(entry.times), waiting_us=waiting_us)
    return replace(row, tflops=problem.flops / row.median / 1e6)


def fastest(rows: Sequence[Row]) -> list[Row]:
    """Keep each competitor's fastest config only, and all of ours."""
    ours = {variant.name for variant in ALL if variant.ours}
    kept: list[Row] = []
    for name in dict.fromkeys(row.way for row in rows):
        group = [row for row in rows if row.way == name]
        kept += group if name in ours else [min(group, key=_rank)]
    return kept


def _rank(row: Row) -> tuple[bool, float]:
    return bool(row.reason), math.inf if math.isnan(row.median) else row.median


def _held(
    entry: _Entry, problem: AttentionProblem, inputs: AttentionInputs
) -> tuple[torch.Tensor, int | None]:
    """The output, and the device memory that was held at most beyond inputs and output."""
    device = inputs[0].device
    if device.type != "cuda":
        return entry.output(problem, inputs), None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    out = entry.output(problem, inputs)
    torch.cuda.synchronize(device)
    held = torch.cuda.max_memory_allocated(device) - before
    return out, max(0, held - out.numel() * out.element_size())


def _why(
    failure: BaseException,
    problem: AttentionProblem,
    said: Sequence[warnings.WarningMessage] = (),
) -> str:
    """Why there are no figures, in one line, with what torch warned of meanwhile."""
    if is_out_of_memory(failure):
        return f"out of memory ({problem})"
    notes = [str(each.message).split(" (Triggered internally")[0].strip() for each in said]
    told = [note for note in dict.fromkeys(notes) if note and not note.endswith(_HEADINGS)]
    return "; ".join([timing.describe(failure), *told])


_HEADINGS = ("not used because:", "runtime disabled.", "been runtime disabled")
"""Ends of warnings that torch gives for each backend, and that explain nothing."""


# -- text and plot --------------------------------------------------------------------------------


def grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each case: those that are compared with each other."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.case, json.dumps(row.problem, sort_keys=True)), []).append(row)
    return list(groups.values())


def _title(row: Row) -> str:
    """The case; batch, heads, queries, keys and head_dim; the dtype."""
    p = row.problem
    sizes = (p[name] for name in ("batch", "heads", "seq_q", "seq_k", "head_dim"))
    return f"{row.case}: {'x'.join(map(str, sizes))} {p['dtype']}"


def render(heading: str, rows: Sequence[Row]) -> str:
    """Every row, then a line per case with ratios."""
    lines = [heading]
    for group in grouped(rows):
        lines += ["", _title(group[0]), *_text(group).lines(group)]
    return "\n".join([*lines, "", *_summary(rows)])


def _text(group: Sequence[Row]) -> TextTable:
    """The table of one case. `ours/it`: our time over its time; the least time has a star."""
    ours, best = time_of(group, OURS), min((row.median for row in group), default=math.nan)

    def times(row: Row) -> str:
        mark = "*" if row.median == best else " "
        return f"{row.median:>9.1f}{mark}{f'{row.p10:.1f}..{row.p90:.1f}':>17}"

    def extra(row: Row) -> str:
        return "" if row.extra_bytes is None else f"{row.extra_bytes / 2**20:.1f}"

    def tiles(row: Row) -> str:
        return " " + ",".join(f"{name}={int(value)}" for name, value in (row.config or {}).items())

    return TextTable(
        (field("variant", -20, "way"),),
        (
            Column(f"{'us':>9} {'p10..p90':>17}", 27, times),
            field("waiting", 8, "waiting_us", ".1f", "-"),
            Column("ours/it", 7, lambda row: _figure(ours / row.median)),
            field("TFLOP/s", 7, "tflops", ".1f", "nan"),
            field("error", 8, "error", ".1e", "nan"),
            Column("extra MiB", 9, extra),
        ),
        tiles,
        absent="not timed",
        indent="  ",
    )


def _summary(rows: Sequence[Row]) -> list[str]:
    """A line per case: µs of ours and of those that ratios are given of, none of them ours too."""
    names = (SDPA, FLASH, METHODS[0].name)
    lines = [
        f"{'case':<34} {'dtype':<8} {'ours us':>9} {'sdpa':>9} {'flash':>9} {'Doggettx':>9} "
        f"{'/sdpa':>6} {'/flash':>6} {'/best':>6} best other"
    ]
    for group in grouped(rows):
        ours, others = time_of(group, OURS), [time_of(group, name) for name in names]
        rest = [row for row in group if OURS not in row.way and row.median > 0]
        best = min(rest, key=lambda row: row.median, default=None)
        ratios = [ours / other for other in others[:2]]
        ratios.append(ours / best.median if best else math.nan)
        times = " ".join(f"{_figure(time, '.1f'):>9}" for time in (ours, *others))
        shares = " ".join(f"{_figure(ratio):>6}" for ratio in ratios)
        dtype = str(group[0].problem["dtype"])
        name = best.way if best else ""
        lines.append(f"{group[0].case:<34} {dtype:<8} {times} {shares} {name}".rstrip())
    return lines


def time_of(group: Sequence[Row], name: str) -> float:
    """Median in µs of the first row of a variant, of ours what Auto takes; NaN where none is."""
    return next((row.median for row in group if row.way == name), math.nan)


def _figure(value: float, form: str = ".2f") -> str:
    return f"{value:{form}}" if math.isfinite(value) else "-"


def draw(rows: Sequence[Row], device: str) -> str:
    """Bars as SVG; what was not timed is left out, of ours all but what Auto takes."""
    bars: list[Row] = []
    limits: dict[str, float] = {}
    for group in grouped(rows):
        case = _title(group[0])
        seen: dict[str, Row] = {}
        for row in group:
            if row.median > 0:
                seen.setdefault(row.way, row)
        bars += [replace(row, case=case, unit="µs") for row in seen.values()]
        ours = time_of(group, OURS)
        if math.isfinite(ours):
            limits[case] = ours * MOST_TIMES
    title = f"Attention on {device}, µs a call: less is better"
    return svg.chart(title, bars, OURS, limits=limits) + "\n"
