"""Attention timed: ours and all that a user could pick instead, each only once it is right."""

from __future__ import annotations

import gc
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from lib_rocm_sd.bench.attention import timing
from lib_rocm_sd.bench.attention.amd_loops import AmdLoops
from lib_rocm_sd.bench.attention.exact import Exact, expected
from lib_rocm_sd.bench.attention.result import AttentionRow
from lib_rocm_sd.bench.methods import ALLOWANCE, METHODS
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.engine.measure import input_sets
from lib_rocm_sd.engine.memory import empty_cache
from lib_rocm_sd.engine.selftest import FAILURES, describe, is_out_of_memory
from lib_rocm_sd.engine.timing import NumberedCall, queued, timed
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Call, Launch, Variant
from lib_rocm_sd.report import config_fields

ROUNDS = 3
"""All variants are timed in turn, so many times, so that a clock that sinks sinks for all."""
LEAST_RUNS = 3
SHORT_US = 400.0
"""Calls up to this length are also timed waited for."""
CLEAN_BYTES = 4 << 30
ALL: tuple[Variant[AttentionProblem, AttentionInputs], ...] = (
    *(variant for variant in ATTENTION.variants if variant.ours),
    AmdLoops(),
    *(variant for variant in ATTENTION.every if not variant.ours),
    *METHODS,
)
"""Ours, then what else a user could pick."""


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


@dataclass
class _Entry:
    """A variant with one config under measurement; its row is final once it has a reason.

    `run`: as the engine calls it for these inputs.
    """

    row: AttentionRow
    variant: Variant[AttentionProblem, AttentionInputs]
    config: Any
    launch: Launch | None
    run: Callable[..., torch.Tensor]
    submit_s: float = 0.0
    round_runs: int = 0
    times: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)


def measure(
    label: str,
    problem: AttentionProblem,
    device: torch.device,
    info: DeviceInfo,
    launch: Launch | None,
    effort: AttentionEffort,
) -> list[AttentionRow]:
    """One row per variant, each verified against float64 before it is timed.

    Of ours with several configs the first, which Auto takes, or all; of others' the fastest.
    """
    empty = AttentionRow(label, asdict(problem), "")
    with torch.no_grad():
        entries = list(_entries(empty, problem, info, launch, effort))
        try:
            sets = _input_sets(problem, device)
            exact = expected(sets[0], problem)
        except FAILURES as failure:
            said = f"inputs and reference: {_why(failure, problem)}"
            return [replace(each.row, reason=each.row.reason or said) for each in entries]
        ready = [each for each in entries if not each.row.reason]
        for each in ready:
            _verify(each, sets, exact, problem, effort)
            _clean(device, each.row)
        for _ in range(ROUNDS):
            for each in ready:
                _round(each, sets, problem)
    return _fastest([_finished(each, problem) for each in entries])


def _entries(
    empty: AttentionRow,
    problem: AttentionProblem,
    info: DeviceInfo,
    launch: Launch | None,
    effort: AttentionEffort,
) -> Iterator[_Entry]:
    for variant in ALL:
        if not effort.wants(variant.name):
            continue
        row = replace(empty, variant=variant.name)
        refusals = variant.refusals(info.arch, problem)
        if not refusals and variant.ours and launch is None:
            refusals = list(info.reasons) or ["there is no launcher"]
        if refusals:
            row = replace(row, reason="; ".join(refusals))
            yield _Entry(row, variant, None, None, variant.run)
            continue
        configs = variant.configs(info.arch, problem)
        if variant.ours and not effort.every_config:
            configs = configs[:1]
        for config in configs:
            shown = replace(row, config=config_fields(config))
            yield _Entry(shown, variant, config, launch if variant.ours else None, variant.run)


def _input_sets(problem: AttentionProblem, device: torch.device) -> list[AttentionInputs]:
    """As (batch, seq, heads*head_dim) in different memory, more of it than the cache has."""
    return input_sets(
        ATTENTION, problem, device, lambda size_bytes: timing.sets_needed(size_bytes, device)
    )


def _call(
    entry: _Entry, sets: Sequence[AttentionInputs], problem: AttentionProblem
) -> NumberedCall:
    def call(number: int) -> None:
        entry.run(Call(problem, sets[number % len(sets)], entry.launch, entry.config))

    return call


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


def _finished(entry: _Entry, problem: AttentionProblem) -> AttentionRow:
    if entry.row.reason:
        return entry.row
    times = sorted(entry.times)
    median_us = statistics.median(times)
    return replace(
        entry.row,
        median_us=median_us,
        p10_us=times[len(times) // 10],
        p90_us=times[len(times) * 9 // 10],
        runs=len(times),
        waiting_us=statistics.median(entry.waiting) if entry.waiting else math.nan,
        tflops=problem.flops / median_us / 1e6,
    )


def _fastest(rows: list[AttentionRow]) -> list[AttentionRow]:
    """Keep each competitor's fastest config only, and all of ours."""
    ours = {variant.name for variant in ALL if variant.ours}
    kept: list[AttentionRow] = []
    for name in dict.fromkeys(row.variant for row in rows):
        group = [row for row in rows if row.variant == name]
        kept += group if name in ours else [min(group, key=_rank)]
    return kept


def _rank(row: AttentionRow) -> tuple[bool, float]:
    return bool(row.reason), math.inf if math.isnan(row.median_us) else row.median_us


def _held(
    entry: _Entry, problem: AttentionProblem, inputs: AttentionInputs
) -> tuple[torch.Tensor, int | None]:
    """The output, and the device memory that was held at most beyond inputs and output."""
    device = inputs[0].device
    if device.type != "cuda":
        return entry.run(Call(problem, inputs, entry.launch, entry.config)), None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    out = entry.run(Call(problem, inputs, entry.launch, entry.config))
    torch.cuda.synchronize(device)
    held = torch.cuda.max_memory_allocated(device) - before
    return out, max(0, held - out.numel() * out.element_size())


def _clean(device: torch.device, row: AttentionRow) -> None:
    """Give back what others may need: a failed or a large variant's memory."""
    if device.type == "cuda" and (row.reason or (row.extra_bytes or 0) > CLEAN_BYTES):
        gc.collect()
        empty_cache(device)


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
    return "; ".join([describe(failure), *told])


_HEADINGS = ("not used because:", "runtime disabled.", "been runtime disabled")
"""Ends of warnings that torch gives for each backend, and that explain nothing."""
