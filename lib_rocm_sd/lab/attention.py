"""`bench attention`: every way to run what Stable Diffusion asks for, ours and all that users could
pick instead, each timed only once it is right.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from dataclasses import field as data
from functools import partial
from typing import Any

import torch

from lib_rocm_sd.checks import UsageError
from lib_rocm_sd.engine.measure import input_sets, queued, timed
from lib_rocm_sd.engine.selftest import FAILURES, is_out_of_memory
from lib_rocm_sd.lab import svg, timing
from lib_rocm_sd.lab.benchmark import Benchmark, Setting
from lib_rocm_sd.lab.methods import ALLOWANCE, METHODS, AmdLoops, Exact, expected
from lib_rocm_sd.lab.rows import (
    OURS,
    Column,
    Columns,
    Countdown,
    Row,
    TextTable,
    field,
    figure,
    is_wrong,
    say,
    spread,
    tiles,
)
from lib_rocm_sd.lab.tables import Problems, named_cases
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import CASES, ODD, AttentionProblem
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


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """The options of `bench attention` alone."""
    add = parser.add_argument
    add("--variant", action="append", metavar="TEXT", help="only variants with this in their name")
    add("--configs", action="store_true", help="every config of ours, not only what Auto takes")


def _rows(args: argparse.Namespace, setting: Setting) -> Iterator[Row]:
    """Raises UsageError where no case or no variant is left."""
    row_s = QUICK_ROW_S if args.quick else ROW_S
    effort = AttentionEffort(setting, row_s, args.configs, tuple(args.variant or ()))
    cases = problems(args, setting.device)
    if not any(effort.wants(variant.name) for variant in ALL):
        names = ", ".join(variant.name for variant in ALL)
        words = " or ".join(args.variant)
        raise UsageError(f"--variant: none of {names} has {words} in its name")
    besides = CASE_FLOPS["cuda" if setting.device.type == "cuda" else "cpu"]

    def rows() -> Iterator[Row]:
        _compile(cases, effort)
        progress = Countdown([besides + problem.flops for _, problem in cases])
        for label, problem in cases:
            progress.next(f"{label}: {problem}")
            yield from measure(label, problem, effort)

    return rows()


def problems(args: argparse.Namespace, device: torch.device) -> Problems:
    """Label and problem of what is asked for, one dtype after the other. Raises UsageError where
    nothing is.
    """
    most = QUICK_CPU_FLOPS if device.type == "cpu" else math.inf
    if args.small:
        every = [(f"odd {number}", problem) for number, problem in enumerate(ODD, 1)]
    else:
        every = [
            (case.name, replace(case.problem, dtype=dtype))
            for dtype in dict.fromkeys(args.dtype or DTYPES[: 1 if args.quick else None])
            for case in CASES
            if args.case or not args.quick or (case.usual and case.problem.flops <= most)
        ]
    return named_cases(every, args.case)


@dataclass(frozen=True)
class AttentionEffort:
    """`setting.runs`: most timed calls of a row; fewer where they take more than `row_s` together.

    `every_config`: of ours, not only what Auto takes. `names`: of variants, parts of them; () is
    all.
    """

    setting: Setting
    row_s: float = 0.6
    every_config: bool = False
    names: tuple[str, ...] = ()

    def wants(self, name: str) -> bool:
        """True for a variant that is to be measured."""
        return not self.names or any(part.lower() in name.lower() for part in self.names)

    def configs(self, variant: Variant[Any, Any], problem: Any) -> Sequence[Any]:
        """What is measured of a variant that takes the problem."""
        every = variant.configs(self.setting.info.arch, problem)
        return every[:1] if variant.ours and not self.every_config else every


def _compile(chosen: Problems, effort: AttentionEffort) -> None:
    """All kernels at once, several at a time; a failure is told by the launch."""
    build, arch = getattr(effort.setting.launch, "build", None), effort.setting.info.arch
    if build is None or arch is None:
        return
    specs: dict[KernelSpec, None] = {}
    ours = [variant for variant in ALL if variant.ours and effort.wants(variant.name)]
    for variant, (_, problem) in itertools.product(ours, chosen):
        if not variant.refusals(arch, problem):
            for config in effort.configs(variant, problem):
                specs.update(dict.fromkeys(variant.specs(arch, problem, config)))
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
    problem: AttentionProblem
    config: Any
    launch: Launch | None
    run: Callable[..., torch.Tensor]
    sets: Sequence[AttentionInputs] = ()
    submit_s: float = 0.0
    round_runs: int = 0
    times: list[float] = data(default_factory=list)
    waiting: list[float] = data(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.sets[0].q.device

    def call(self, number: int) -> torch.Tensor:
        """The output for the inputs of a number."""
        inputs = self.sets[number % len(self.sets)]
        return self.run(Call(self.problem, inputs, self.launch, self.config))

    def verify(self, exact: Exact, effort: AttentionEffort) -> None:
        """Compare with float64, note the memory, warm up and decide on the number of runs."""
        device = self.device
        try:
            with warnings.catch_warnings(record=True) as notes:
                warnings.simplefilter("always")
                call = Call(self.problem, self.sets[0], self.launch, self.config)
                self.run = self.variant.bound(call)
                self.call(0)  # compile, load, allocate workspaces of libraries
            peak = timing.Peak(device)
            out = self.call(0)
            peak_bytes, size = peak.bytes(), out.numel() * out.element_size()
            extra = None if peak_bytes is None else max(0, peak_bytes - size)
            error = exact.error(out)
            del out
            self.row = replace(self.row, error=error, checked_rows=exact.rows, extra_bytes=extra)
            allowance = ALLOWANCE if self.variant in METHODS else 1.0
            if not error <= allowance * ATTENTION.tolerance(self.problem):
                self.row = replace(self.row, reason=f"wrong: error {error:.1e}")
                return
            self.submit_s = timing.warm_up(self.call, device)
            once_us = min(timed(self.call, 2, device))
            runs = min(
                effort.setting.runs, max(int(1e6 * effort.row_s / max(once_us, 1e-3)), LEAST_RUNS)
            )
            self.round_runs = -(-runs // ROUNDS)
            if once_us <= SHORT_US and device.type == "cuda":
                self.waiting = timed(self.call, runs, device)
        except FAILURES as failure:
            self.row = replace(self.row, reason=_why(failure, self.problem, notes))

    def time(self) -> None:
        """A round, if there is no reason not to."""
        if self.row.reason:
            return
        try:
            queued(self.call, min(self.round_runs, 3), self.device, self.submit_s)
            self.times += queued(self.call, self.round_runs, self.device, self.submit_s)
        except FAILURES as failure:
            self.row = replace(self.row, reason=_why(failure, self.problem))

    def finished(self) -> Row:
        """The row with its figures, or why there are none."""
        if self.row.reason:
            return self.row
        waiting_us = statistics.median(self.waiting) if self.waiting else math.nan
        row = replace(self.row, **spread(self.times), waiting_us=waiting_us)
        return replace(row, tflops=self.problem.flops / row.median / 1e6)


def measure(
    label: str,
    problem: AttentionProblem,
    effort: AttentionEffort,
) -> list[Row]:
    """One row per variant, each verified against float64 before it is timed.

    Of ours with several configs the first, which Auto takes, or all; of others' the fastest.
    """
    start, device = Row(case=label, problem=asdict(problem)), effort.setting.device
    with torch.no_grad():
        entries = list(_entries(start, problem, effort))
        try:
            # In different memory, more of it than the cache has.
            sets_needed = partial(timing.sets_needed, device=device)
            sets = input_sets(ATTENTION, problem, device, sets_needed)
            exact = expected(sets[0], problem)
        except FAILURES as failure:
            why = f"inputs and reference: {_why(failure, problem)}"
            return [replace(each.row, reason=each.row.reason or why) for each in entries]
        ready = [each for each in entries if not each.row.reason]
        for each in ready:
            each.sets = sets
            each.verify(exact, effort)
            failed_or_large = each.row.reason or (each.row.extra_bytes or 0) > CLEAN_BYTES
            if device.type == "cuda" and failed_or_large:  # others may need its memory
                timing.clean(device)
        for each in ready * ROUNDS:
            each.time()
    return fastest([each.finished() for each in entries])


def _entries(start: Row, problem: AttentionProblem, effort: AttentionEffort) -> Iterator[_Entry]:
    for variant in ALL:
        if not effort.wants(variant.name):
            continue
        row = replace(start, way=variant.name)
        refusals = effort.setting.refusals(variant, problem)
        if refusals:
            row = replace(row, reason="; ".join(refusals))
            yield _Entry(row, variant, problem, None, None, variant.run)
            continue
        for config in effort.configs(variant, problem):
            shown = replace(row, config=config_fields(config))
            own = effort.setting.launch if variant.ours else None
            yield _Entry(shown, variant, problem, config, own, variant.run)


def fastest(rows: Sequence[Row]) -> list[Row]:
    """Keep each competitor's fastest config only, and all of ours."""
    ours = {variant.name for variant in ALL if variant.ours}
    best_rows: list[Row] = []
    for name in dict.fromkeys(row.way for row in rows):
        group = [row for row in rows if row.way == name]
        timed_ones = [row for row in group if not row.reason]
        best = min(timed_ones, key=lambda row: row.median, default=group[0])
        best_rows += group if name in ours else [best]
    return best_rows


def _why(
    failure: BaseException,
    problem: AttentionProblem,
    said: Sequence[warnings.WarningMessage] = (),
) -> str:
    """Why there are no figures, in one line, with what torch warned of meanwhile."""
    if is_out_of_memory(failure):
        return f"out of memory ({problem})"
    notes = [str(each.message).split(" (Triggered internally")[0].strip() for each in said]
    lines = [note for note in dict.fromkeys(notes) if note and not note.endswith(_HEADINGS)]
    return "; ".join([timing.describe(failure), *lines])


_HEADINGS = ("not used because:", "runtime disabled.", "been runtime disabled")
"""Ends of warnings that torch gives for each backend, and that explain nothing."""


# -- text and plot --------------------------------------------------------------------------------


def grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each case: those that are compared with each other."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(json.dumps([row.case, row.problem], sort_keys=True), []).append(row)
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

    return TextTable(
        (field("variant", -20, "way"),),
        (
            Column(f"{'us':>9} {'p10..p90':>17}", 27, times),
            field("waiting", 8, "waiting_us", ".1f", "-"),
            Column("ours/it", 7, lambda row: figure(ours / row.median)),
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
        times = " ".join(f"{figure(time, '.1f'):>9}" for time in (ours, *others))
        shares = " ".join(f"{figure(ratio):>6}" for ratio in ratios)
        dtype = str(group[0].problem["dtype"])
        name = best.way if best else ""
        lines.append(f"{group[0].case:<34} {dtype:<8} {times} {shares} {name}".rstrip())
    return lines


def time_of(group: Sequence[Row], name: str) -> float:
    """Median in µs of the first row of a variant, of ours what Auto takes; NaN where none is."""
    return next((row.median for row in group if row.way == name), math.nan)


def draw(rows: Sequence[Row], device: str) -> str:
    """Bars as SVG; what was not timed is left out, of ours all but what Auto takes."""
    bars: list[Row] = []
    limits: dict[str, float] = {}
    for group in grouped(rows):
        case = _title(group[0])
        first_rows: dict[str, Row] = {}
        for row in group:
            if row.median > 0:
                first_rows.setdefault(row.way, row)
        bars += [replace(row, case=case, unit="µs") for row in first_rows.values()]
        ours = time_of(group, OURS)
        if math.isfinite(ours):
            limits[case] = ours * MOST_TIMES
    title = f"Attention on {device}, µs a call: less is better"
    return svg.chart(title, bars, OURS, limits=limits) + "\n"


BENCHMARK = Benchmark(
    COLUMNS,
    _rows,
    render,
    (RUNS, QUICK_RUNS),
    is_wrong=lambda result: is_wrong([row for row in result.rows if row.way == OURS]),
    draw=draw,
)
