"""A speed test as CSV, as Markdown for posting, and as SVG to stand inside a page.

What stands in a result is never trusted.
"""

from __future__ import annotations

import csv
import io
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
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
HEAD = ("Median", "p10 to p90", "Runs", "Peak MiB", "Error", "Energy", "Times ours")


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
    letters = (" " if unicodedata.category(c) in ("Cc", "Zl", "Zp") else c for c in text)
    return "".join(c for c in letters if unicodedata.category(c)[0] != "C")


def escaped(value: object) -> str:
    """`value` as plain text inside a line or a table of Markdown, whatever it is made of."""
    text = " ".join(printable(str(value)).split())
    text = RISKY.sub(lambda match: f"&#{ord(match.group())};", text)
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
    lines = [f"| Case | Method | {' | '.join(HEAD)} |", "|---|---|--:|--:|--:|--:|--:|--:|--:|"]
    for row in rows:
        cells = escaped(row.reason) + " |" * (len(HEAD) - 1)
        if not row.reason:
            cells = " | ".join(figures(row, rows, test).values())
        lines.append(f"| {escaped(row.case)} | {escaped(row.way)} | {cells} |")
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
        "Energy": f"{number(row.energy_j)} J" if math.isfinite(row.energy_j) else "",
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
    "upscaler": "Upscaling, ms a picture: less is better",
    "image": "Whole images, s an image: less is better",
}
HISTORY_HEIGHT, HISTORY_TOP, MOST_LINES = 220, 44, 8
MOST_RUNS = 30


def drawn_bars(document: Document, layout: Layout = WIDE) -> dict[str, str]:
    """An SVG per test that has a figure: a group of bars per case, a bar per method."""
    plots = {}
    for test, title in TITLES.items():
        rows = [row for row in document.rows if row.test == test and row.unit != "it/s"]
        if any(row.median > 0 for row in rows):
            plots[test] = svg.chart(title, rows, OURS[test], layout)
    return plots


def drawn_history(documents: Sequence[Document], layout: Layout = WIDE) -> str:
    """Our figures over the runs of a machine, the newest on the right, each of the first measured.

    Empty where fewer than two runs have a figure.
    """
    recent = list(documents)[-MOST_RUNS:]
    curves = _curves(recent)
    if not curves:
        return ""
    values = [100.0, *(value for points in curves.values() for _, value in points)]
    pad = max((max(values) - min(values)) * 0.1, 2.0)
    low, high = max(min(values) - pad, 0.0), max(values) + pad
    left, right, bottom = 56, layout.width - 24, HISTORY_TOP + HISTORY_HEIGHT
    last = len(recent) - 1

    def x_of(place: int) -> float:
        return left + place / max(last, 1) * (right - left)

    def y_of(value: float) -> float:
        return bottom - (value - low) / (high - low) * HISTORY_HEIGHT

    parts = [svg.title_of("Time, % of the first run here: less is better", layout)]
    for share in range(5):
        value = low + share / 4 * (high - low)
        parts.append(svg.line(left, y_of(value), right, y_of(value), 0.25))
        parts.append(svg.text_at(left - 6, y_of(value) + 4, f"{value:.0f} %", "end", faint=True))
    for place, anchor in ((0, "start"), (last, "end")):
        date = recent[place].date[:10]
        parts.append(svg.text_at(x_of(place), bottom + 18, date, anchor, True))
    for place, (name, points) in enumerate(curves.items()):
        colour, top = svg.colour_of(place), bottom + 44 + 20 * place
        places = [(x_of(at), y_of(value)) for at, value in points]
        tips = [f"{recent[at].date}, {name}: {value:.0f} %" for at, value in points]
        parts += svg.curve(places, colour, tips)
        parts.append(f'<rect x="0" y="{top - 10}" width="12" height="12" style="fill:{colour}"/>')
        cut = svg.cut(name, layout.letters - 12)
        parts.append(svg.text_at(20, top, f"{cut}: {points[-1][1]:.0f} % now"))
    spoken = (f"{name}: {points[-1][1]:.0f} % of the first run" for name, points in curves.items())
    height = bottom + 50 + 20 * len(curves)
    return svg.drawing(layout.width, height, parts, f"History. {'; '.join(spoken)}")


def _curves(documents: Sequence[Document]) -> dict[str, list[tuple[int, float]]]:
    """Our results for the cases measured most often: the runs' places, times in % of the first."""
    times: dict[str, list[tuple[int, float]]] = {}
    for place, document in enumerate(documents):
        for test in TITLES:
            for row in ours(document.rows, test):
                if row.unit != "it/s":
                    name = f"{test}, {svg.cut(row.case, 60)}"
                    times.setdefault(name, []).append((place, row.median))
    often = sorted((each for each in times.items() if len(each[1]) > 1), key=lambda i: -len(i[1]))
    return {
        name: [(place, 100 * time / points[0][1]) for place, time in points]
        for name, points in often[:MOST_LINES]
    }
