"""A result as CSV and as Markdown for posting. What stands in it is never trusted."""

from __future__ import annotations

import csv
import io
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from lib_rocm_sd.lab.svg import number
from lib_rocm_sd.speedtest.result import FIELDS, OURS, WHAT, Document, SpeedRow

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for the beginning of a formula."""
RISKY = re.compile(r"[^\w .,;:()%/='+-]|(?<!\w)_|_(?!\w)|:(?! |$)|(?<=/)/")
"""Characters that Markdown, HTML or a forge may give a meaning."""
WWW = re.compile(r"(www)\.", re.IGNORECASE)
MACHINE = (
    ("card", "Card"),
    ("gfx", "gfx id"),
    ("vram_mib", "VRAM, MiB"),
    ("driver", "Driver"),
    ("rocm", "ROCm"),
    ("cuda", "CUDA"),
    ("torch", "torch"),
    ("os", "System"),
    ("power_limit_w", "Power limit, W"),
    ("power_w", "Power when idle, W"),
    ("clock_mhz", "Highest clock, MHz"),
    ("memory_clock_mhz", "Highest memory clock, MHz"),
    ("rocm_sd", "rocm_sd"),
)
HEAD = ("Case", "Method", "Median", "p10 to p90", "Runs", "Peak MiB", "Error", "Times ours")


def to_csv(document: Document) -> str:
    """A line per row; the machine's card, gfx id and the date on each."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["date", "card", "gfx", *FIELDS])
    about = [document.date, document.machine.get("card"), document.machine.get("gfx")]
    for row in document.rows:
        writer.writerow([_cell(value) for value in [*about, *row.as_dict().values()]])
    return text.getvalue()


def _cell(value: object) -> object:
    if isinstance(value, str):
        value = " ".join(printable(value).split())
        return f"'{value}" if value.startswith(FORMULA) else value
    return "" if value is None else value


def printable(text: str) -> str:
    """Without control characters and those that turn the direction of writing."""
    kept = (" " if unicodedata.category(c) in ("Cc", "Zl", "Zp") else c for c in text)
    return "".join(c for c in kept if unicodedata.category(c)[0] != "C")


def escaped(value: object) -> str:
    """`value` as plain text inside a line or a table of Markdown, whatever it is made of."""
    text = " ".join(printable(str(value)).split())
    text = RISKY.sub(lambda found: f"&#{ord(found.group())};", text)
    return WWW.sub(r"\1&#46;", text)


def to_markdown(document: Document) -> str:
    """Machine, a table per test, notes: to be posted as it is."""
    lines = [f"### Speed test, {escaped(document.date[:10])}", ""]
    facts = [
        f"{title} {escaped(document.machine[key])}"
        for key, title in MACHINE
        if document.machine.get(key) not in (None, "")
    ]
    lines += ["; ".join(facts) or "machine unknown", ""]
    for test in WHAT:
        rows = [row for row in document.rows if row.test == test]
        if rows:
            lines += [f"**{test}**", "", *table(rows, test), ""]
    for pair in document.pictures:
        lines.append(
            f"Pictures, {escaped(pair.case)}: off and on differ by at most {pair.largest} of 255, "
            f"{pair.mean:.3g} on the mean."
        )
    lines += [f"Note: {escaped(note)}." for note in document.notes]
    if not document.complete:
        lines.append("The test was not run to its end.")
    lines += ["", METHODS_SAID]
    return "\n".join(lines).rstrip() + "\n"


METHODS_SAID = (
    "Doggettx-like and sub-quadratic-like are our own re-implementations of these methods. Error: "
    "largest difference from an exact computation, of a denoising step from the one with the "
    "extension off, relative to the largest value."
)


def table(rows: Sequence[SpeedRow], test: str) -> list[str]:
    """The rows of a test as lines of Markdown. "Times ours": how many times our time it takes."""
    lines = [f"| {' | '.join(HEAD)} |", "|---|---|--:|--:|--:|--:|--:|--:|"]
    reference = {
        (row.case, row.unit): row.median
        for row in rows
        if row.method == OURS[test] and not row.reason
    }
    for row in rows:
        start = f"| {escaped(row.case)} | {escaped(row.method)} |"
        if row.reason:
            lines.append(f"{start} {escaped(row.reason)} | | | | | |")
            continue
        spread = f"{number(row.p10)} to {number(row.p90)}"
        cells = [f"{number(row.median)} {row.unit}", spread, str(row.runs)]
        cells += [_peak(row), f"{row.error:.1e}" if math.isfinite(row.error) else ""]
        cells.append(_times(row, reference.get((row.case, row.unit))))
        lines.append(f"{start} {' | '.join(cells)} |")
    return lines


def _peak(row: SpeedRow) -> str:
    return f"{row.peak_mib:.0f}" if math.isfinite(row.peak_mib) else ""


def _times(row: SpeedRow, reference: float | None) -> str:
    """How many times as long as ours it takes."""
    if not reference or not row.median > 0:
        return ""
    ratio = reference / row.median if row.unit == "it/s" else row.median / reference
    return f"{number(ratio)}x"


def machine_line(machine: Mapping[str, Any]) -> str:
    """Card and gfx id in a few words, not escaped."""
    gfx = machine.get("gfx") or machine.get("backend") or ""
    return f"{machine.get('card') or 'unknown card'} ({gfx})" if gfx else str(machine.get("card"))
