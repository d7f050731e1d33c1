"""The tables that a person reads, and what is wrong with the figures in them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lib_rocm_sd.bench.vae.result import VaeRow, ordered

EAGER = "eager"
OURS = "rocm_sd"
STEPS_MOST, SHARE_MOST = 1, 1e-4
"""How far bands may be from the whole frame: in 1/255 steps, and the share of differing values."""
FLOOR = {"float16": 0.01, "bfloat16": 0.08}
"""An error of ours up to this is not asked about."""

HEAD = (
    f"{'pixels':>6} {'way':<26} {'ms':>9} {'p10..p90':>17} {'ms/MP':>8} {'first':>9} {'/2nd':>6} "
    f"{'peak MiB':>9} {'error':>8} {'shift':>8}  plan"
)


def render(heading: str, rows: Sequence[VaeRow]) -> str:
    """All rows, a table per role."""
    lines = [f"{heading}; Stable Diffusion's VAE with random weights, batch 1"]
    for role in dict.fromkeys(row.role for row in ordered(rows)):
        lines += ["", role, HEAD, *(line(row) for row in ordered(rows) if row.role == role)]
    return "\n".join(lines)


def line(row: VaeRow) -> str:
    """One row of a table."""
    start = f"{row.size:>6} {row.way:<26}"
    if row.reason:
        return f"{start} not measured: {row.reason}"
    spread = f"{row.p10_ms:.1f}..{row.p90_ms:.1f}"
    text = (
        f"{start} {row.median_ms:>9.1f} {spread:>17} {row.ms_per_megapixel:>8.1f} "
        f"{row.first_ms:>9.1f} {_number(row.first_ratio, '.2f', 6)} "
        f"{_number(row.peak_mib, '.0f', 9)} {_number(row.error, '.1e', 8)} "
        f"{_number(row.shift, '.1e', 8)}  "
    )
    notes = [row.plan]
    if not math.isnan(row.compile_s):
        notes.append(f"compiled in {row.compile_s:.0f} s")
    if not math.isnan(row.steps):
        notes.append(f"{row.steps:.0f}/255 on {row.steps_share:.4%} beside the whole frame")
    return text + "; ".join(note for note in [*notes, row.note] if note)


def _number(value: float, form: str, width: int) -> str:
    return f"{'' if math.isnan(value) else format(value, form):>{width}}"


def complaints(rows: Sequence[VaeRow], dtype: str) -> list[str]:
    """What is wrong with rows of ours: values, or bands that differ from the whole frame."""
    found = []
    for row in rows:
        if not row.way.startswith(OURS):
            continue
        where = f"{row.role} {row.size} {row.way}"
        beside = (other for other in rows if (other.role, other.size) == (row.role, row.size))
        eager = next((other.error for other in beside if other.way == EAGER), math.nan)
        most = max(FLOOR[dtype], 0.0 if math.isnan(eager) else 2 * eager)
        if row.reason.startswith("wrong"):
            found.append(f"{where}: {row.reason}")
        if row.error > most:
            found.append(f"{where}: error {row.error:.1e}, at most {most:.1e} is right")
        if row.steps > STEPS_MOST or row.steps_share > SHARE_MOST:
            far = f"{row.steps:.0f}/255 on {row.steps_share:.4%} of the values"
            found.append(f"{where}: bands differ from the whole frame by {far}")
    return found
