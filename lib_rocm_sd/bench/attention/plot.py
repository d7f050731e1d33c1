"""Bars of every case as an SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lib_rocm_sd.bench import svg
from lib_rocm_sd.bench.attention.result import OURS, AttentionRow
from lib_rocm_sd.bench.attention.text import grouped, time_of

MOST_TIMES = 5.0
"""A bar ends at so many times ours; its figure tells the rest."""


def draw(rows: Sequence[AttentionRow], device: str) -> str:
    """The SVG; what was not timed is left out, of ours all but what Auto takes."""
    shown: list[svg.Bar] = []
    limits: dict[str, float] = {}
    for group in grouped(rows):
        case = f"{group[0].label}: {group[0].shape}"
        seen: dict[str, AttentionRow] = {}
        for row in group:
            if row.median_us > 0:
                seen.setdefault(row.variant, row)
        shown += [_bar(case, row) for row in seen.values()]
        ours = time_of(group, OURS)
        if math.isfinite(ours):
            limits[case] = ours * MOST_TIMES
    title = f"Attention on {device}, µs a call: less is better"
    return svg.chart(title, shown, OURS, limits=limits) + "\n"


def _bar(case: str, row: AttentionRow) -> svg.Bar:
    figures = (row.median_us, row.p10_us, row.p90_us, row.runs)
    return svg.Bar(case, row.variant, "µs", *figures)
