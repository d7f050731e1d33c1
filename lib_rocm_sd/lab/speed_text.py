"""A speed test as CSV, as Markdown for posting, and as SVG to stand inside a page.

What stands in a result is never trusted.
"""

from __future__ import annotations

import csv
import io
import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from lib_rocm_sd.lab import svg
from lib_rocm_sd.lab.rows import Row
from lib_rocm_sd.lab.speed_result import COLUMNS, OURS, WHAT, Document, ours
from lib_rocm_sd.lab.svg import WIDE, Layout, number

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
HEAD = ("Median", "p10 to p90", "Runs", "Peak MiB", "Error", "Times ours")


def to_csv(document: Document) -> str:
    """A line per row; the machine's card, gfx id and the date on each."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["date", "card", "gfx", *COLUMNS.fields])
    about = [document.date, document.machine.get("card"), document.machine.get("gfx")]
    for row in document.rows:
        writer.writerow([_cell(value) for value in [*about, *COLUMNS.as_json(row).values()]])
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
            lines += [f"**{test}**", "", *markdown_table(rows, test), ""]
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


def markdown_table(rows: Sequence[Row], test: str) -> list[str]:
    """The rows of a test as lines of Markdown."""
    lines = [f"| Case | Method | {' | '.join(HEAD)} |", "|---|---|--:|--:|--:|--:|--:|--:|"]
    for row in rows:
        told = f"{escaped(row.reason)} | | | | |"
        if not row.reason:
            told = " | ".join(figures(row, rows, test).values())
        lines.append(f"| {escaped(row.case)} | {escaped(row.way)} | {told} |")
    return lines


def figures(row: Row, rows: Sequence[Row], test: str) -> dict[str, str]:
    """The figures of a row of a test, by HEAD. "Times ours": how many times as long as ours it
    takes.
    """
    same = [o for o in ours(rows, test) if (o.case, o.unit) == (row.case, row.unit)]
    reference = same[0].median if same else math.nan
    ratio = reference / row.median if row.unit == "it/s" else row.median / reference
    return {
        "Median": f"{number(row.median)} {row.unit}",
        "p10 to p90": f"{number(row.p10)} to {number(row.p90)}",
        "Runs": str(row.runs),
        "Peak MiB": f"{row.peak_mib:.0f}" if math.isfinite(row.peak_mib) else "",
        "Error": f"{row.error:.1e}" if math.isfinite(row.error) else "",
        "Times ours": f"{number(ratio)}x" if math.isfinite(ratio) else "",
    }


def machine_line(machine: Mapping[str, Any]) -> str:
    """Card and gfx id in a few words, not escaped."""
    gfx = machine.get("gfx") or machine.get("backend") or ""
    return f"{machine.get('card') or 'unknown card'} ({gfx})" if gfx else str(machine.get("card"))


TITLES = {
    "attention": "Attention, ms a call: less is better",
    "vae": "VAE, ms a picture: less is better",
    "step": "Denoising step, ms: less is better",
    "image": "Whole images, s an image: less is better",
}
HISTORY_HEIGHT, HISTORY_TOP, MOST_LINES = 220, 44, 8
MOST_RUNS = 30


def drawn_bars(document: Document, layout: Layout = WIDE) -> dict[str, str]:
    """An SVG per test that has a figure: a group of bars per case, a bar per method."""
    found = {}
    for test, title in TITLES.items():
        rows = [row for row in document.rows if row.test == test and row.unit != "it/s"]
        if any(row.median > 0 for row in rows):
            found[test] = svg.chart(title, rows, OURS[test], layout)
    return found


def drawn_history(documents: Sequence[Document], layout: Layout = WIDE) -> str:
    """Our figures over the runs of a machine, the newest on the right, each of the first measured.

    Empty where fewer than two runs have a figure.
    """
    shown = list(documents)[-MOST_RUNS:]
    lines = _lines(shown)
    if not lines:
        return ""
    known = [value for line in lines for _, value in line.points]
    low, high = min(100.0, *known), max(100.0, *known)
    pad = max((high - low) * 0.1, 2.0)
    frame = _Frame(len(shown), max(low - pad, 0.0), high + pad, layout.width - 24)
    parts = [svg.title_of("Time, % of the first run here: less is better", layout)]
    parts += _axes(frame, shown)
    for place, line in enumerate(lines):
        colour = svg.colour_of(place)
        points = [(frame.x(at), frame.y(value)) for at, value in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(
            f'<polyline points="{path}" style="fill:none;stroke:{colour}" stroke-width="2"/>'
        )
        for (x, y), (at, value) in zip(points, line.points, strict=True):
            tip = escape(f"{shown[at].date}, {line.name}: {value:.0f} %")
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" style="fill:{colour}">'
                f"<title>{tip}</title></circle>"
            )
        top = frame.bottom + 44 + 20 * place
        parts.append(f'<rect x="0" y="{top - 10}" width="12" height="12" style="fill:{colour}"/>')
        name = svg.cut(line.name, layout.letters - 12)
        parts.append(svg.text_at(20, top, f"{name}: {line.points[-1][1]:.0f} % now"))
    label = "; ".join(f"{line.name}: {line.points[-1][1]:.0f} % of the first run" for line in lines)
    height = frame.bottom + 50 + 20 * len(lines)
    return svg.drawing(layout.width, height, parts, f"History. {label}")


@dataclass(frozen=True)
class _Curve:
    """A case's points: the run's place and its time in % of the first."""

    name: str
    points: list[tuple[int, float]]


@dataclass(frozen=True)
class _Frame:
    runs: int
    low: float
    high: float
    right: float

    bottom = HISTORY_TOP + HISTORY_HEIGHT
    left = 56

    def x(self, place: int) -> float:
        return self.left + place / max(self.runs - 1, 1) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.low) / (self.high - self.low) * HISTORY_HEIGHT


def _lines(documents: Sequence[Document]) -> list[_Curve]:
    """Curves of our results for the cases measured most often."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for place, document in enumerate(documents):
        for test in TITLES:
            for row in ours(document.rows, test):
                if row.unit != "it/s":
                    found.setdefault((test, row.case), []).append((place, row.median))
    often = sorted((item for item in found.items() if len(item[1]) > 1), key=lambda i: -len(i[1]))
    return [
        _Curve(
            f"{test}, {svg.cut(case, 60)}",
            [(at, 100 * value / points[0][1]) for at, value in points],
        )
        for (test, case), points in often[:MOST_LINES]
    ]


def _axes(frame: _Frame, documents: Sequence[Document]) -> Iterator[str]:
    for share in range(5):
        value = frame.low + share / 4 * (frame.high - frame.low)
        y = frame.y(value)
        yield svg.line(frame.left, y, frame.right, y, 0.25)
        yield svg.text_at(frame.left - 6, y + 4, f"{value:.0f} %", "end", faint=True)
    last = len(documents) - 1
    for place, anchor in ((0, "start"), (last, "end")):
        yield svg.text_at(
            frame.x(place), frame.bottom + 18, documents[place].date[:10], anchor, True
        )
