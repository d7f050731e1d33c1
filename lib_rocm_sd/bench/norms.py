"""What the benchmarks of norms have in common: rows, how they are timed and printed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from lib_rocm_sd.bench.rows import TimedRow, Timer, figured, spread, tiles
from lib_rocm_sd.engine.selftest import relative_error
from lib_rocm_sd.engine.timing import keep_busy, timed
from lib_rocm_sd.ops.base import Op

BYTES_BESIDE = 1e6
"""What a norm takes beside its tensor, as bytes of one: for the estimate of the time left."""
BATCH = 20
"""Calls that are timed together where a queue is kept full."""
Call = Callable[..., Any]


@dataclass(frozen=True)
class NormRow(TimedRow):
    """One way to run one norm."""

    gigabytes_per_s: float = math.nan
    of_copy: float = math.nan


def timed_with_a_full_queue(
    call: Callable[[int], None], runs: int, device: torch.device
) -> list[float]:
    """Times in µs of a call, from `runs` batches, the queue of the GPU being full: what the CPU
    does between two launches does not count. On a CPU as engine.timing.timed.
    """
    if device.type != "cuda":
        return timed(call, runs, device)
    found: list[float] = []
    with torch.cuda.device(device):
        for run in range(runs):
            torch.cuda.synchronize(device)
            begin = perf_counter()
            for number in range(BATCH):
                call(run * BATCH + number)
            took_s = perf_counter() - begin
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            keep_busy(2 * took_s)
            first.record()
            for number in range(BATCH):
                call(run * BATCH + number)
            last.record()
            torch.cuda.synchronize(device)
            found.append(1000.0 * first.elapsed_time(last) / BATCH)
    return found


def verified(
    op: Op[Any, Any],
    row: NormRow,
    sets: Sequence[Any],
    call: Call,
    exact: Any,
    moved_bytes: int,
    runs: int,
    timer: Timer = timed,
) -> NormRow:
    """`row` with figures, or the reason why not. `call` is given the inputs of one of `sets` one by
    one; of several outputs each is compared with its part of `exact`.
    """

    def error() -> float:
        made = call(*sets[0])
        pairs = zip(made, exact, strict=True) if isinstance(made, tuple) else [(made, exact)]
        return max(relative_error(each, wanted) for each, wanted in pairs)

    tolerance = op.tolerance(op.problem_of(sets[0]))
    return figured(
        row, error, tolerance, lambda: timed_row(row, sets, call, moved_bytes, runs, timer)
    )


def timed_row(
    row: NormRow,
    sets: Sequence[Any],
    call: Call,
    moved_bytes: int,
    runs: int,
    timer: Timer = timed,
) -> NormRow:
    """`row` with its times, and with the speed at which it moves so many bytes."""
    device = sets[0][0].device

    def once(number: int) -> None:
        call(*sets[number % len(sets)])

    times = spread(once, runs, device, timer)
    row = replace(row, **times)  # type: ignore[arg-type]
    return replace(row, gigabytes_per_s=moved_bytes / row.median_us / 1e3)


def beside(row: NormRow, copy: NormRow) -> NormRow:
    """`row` with its time over what its bytes take at the speed of `copy`."""
    return replace(row, of_copy=copy.gigabytes_per_s / row.gigabytes_per_s)


def render(heading: str, rows: list[NormRow]) -> str:
    """The table that a person reads."""
    lines = [
        heading,
        f"{'problem':<52} {'way':<12} {'us':>9} {'p10..p90':>17} {'GB/s':>7} {'of copy':>7} "
        f"{'error':>8}",
    ]
    for row in rows:
        if row.reason:
            lines.append(f"{row.problem:<52} {row.way:<12} not run: {row.reason}")
            continue
        spread = f"{row.p10_us:.1f}..{row.p90_us:.1f}"
        error = "" if math.isnan(row.error) else f"{row.error:8.1e}"
        lines.append(
            f"{row.problem:<52} {row.way:<12} {row.median_us:>9.1f} {spread:>17} "
            f"{row.gigabytes_per_s:>7.0f} {row.of_copy:>7.2f} {error:>8} {tiles(row)}".rstrip()
        )
    return "\n".join(lines)
