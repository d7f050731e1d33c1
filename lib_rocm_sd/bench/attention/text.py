"""The tables that a person reads: every row, then a line per case with ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lib_rocm_sd.bench.attention.result import FLASH, OURS, SDPA, AttentionRow
from lib_rocm_sd.bench.methods import METHODS


def grouped(rows: Sequence[AttentionRow]) -> list[list[AttentionRow]]:
    """The rows of each case."""
    groups: dict[tuple[str, str], list[AttentionRow]] = {}
    for row in rows:
        groups.setdefault(row.case, []).append(row)
    return list(groups.values())


def render(heading: str, rows: Sequence[AttentionRow]) -> str:
    """All of it, the summary last."""
    lines = [heading]
    for group in grouped(rows):
        lines += ["", f"{group[0].label}: {group[0].shape}", *_group(group)]
    return "\n".join([*lines, "", *_summary(rows)])


def _group(group: Sequence[AttentionRow]) -> list[str]:
    """Lines for one case: a head, then one per variant. `ours/it`: our time over its time."""
    ours, best = time_of(group, OURS), min((row.median_us for row in group), default=math.nan)
    lines = [
        f"  {'variant':<20} {'us':>9} {'p10..p90':>17} {'waiting':>8} {'ours/it':>7} "
        f"{'TFLOP/s':>7} {'error':>8} {'extra MiB':>9}"
    ]
    for row in group:
        if row.reason:
            lines.append(f"  {row.variant:<20} not timed: {row.reason}")
            continue
        extra = "" if row.extra_bytes is None else f"{row.extra_bytes / 2**20:.1f}"
        spread = f"{row.p10_us:.1f}..{row.p90_us:.1f}"
        mark = "*" if row.median_us == best else " "
        lines.append(
            f"  {row.variant:<20} {row.median_us:>9.1f}{mark}{spread:>17} "
            f"{_figure(row.waiting_us, '.1f'):>8} {_figure(ours / row.median_us):>7} "
            f"{row.tflops:>7.1f} {row.error:>8.1e} {extra:>9} {tiles(row.config)}".rstrip()
        )
    return lines


def _summary(rows: Sequence[AttentionRow]) -> list[str]:
    """A line per case: µs of ours and of those that ratios are given of, none of them ours too."""
    doggettx = METHODS[0].name
    names = (SDPA, FLASH, doggettx)
    lines = [
        f"{'case':<34} {'dtype':<8} {'ours us':>9} {'sdpa':>9} {'flash':>9} {'Doggettx':>9} "
        f"{'/sdpa':>6} {'/flash':>6} {'/best':>6} best other"
    ]
    for group in grouped(rows):
        ours, others = time_of(group, OURS), [time_of(group, name) for name in names]
        rest = [row for row in group if OURS not in row.variant and row.median_us > 0]
        best = min(rest, key=lambda row: row.median_us, default=None)
        ratios = [ours / other for other in others[:2]]
        ratios.append(ours / best.median_us if best else math.nan)
        times = " ".join(f"{_figure(time, '.1f'):>9}" for time in (ours, *others))
        shares = " ".join(f"{_figure(ratio):>6}" for ratio in ratios)
        dtype = str(group[0].problem["dtype"])
        name = best.variant if best else ""
        lines.append(f"{group[0].label:<34} {dtype:<8} {times} {shares} {name}".rstrip())
    return lines


def time_of(group: Sequence[AttentionRow], name: str) -> float:
    """Median in µs of the first row of a variant, of ours what Auto takes; NaN where none is."""
    times = (row.median_us for row in group if row.variant == name)
    return next(times, math.nan)


def tiles(config: dict[str, Any] | None) -> str:
    """A config on one line."""
    return ",".join(f"{name}={int(value)}" for name, value in (config or {}).items())


def _figure(value: float, form: str = ".2f") -> str:
    return f"{value:{form}}" if math.isfinite(value) else "-"
