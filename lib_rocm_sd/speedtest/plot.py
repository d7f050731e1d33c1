"""Plots as SVG text, to stand inside a page: light or dark by currentColor.

Colours may be set by the CSS variables --rocm-sd-plot-1 (ours) to -8. Everything that came with a
result is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from lib_rocm_sd.speedtest.result import OURS, Document, Row, ours

COLOURS = (
    "#d1495b",
    "#3b7ea1",
    "#8a6fb0",
    "#6b8e4e",
    "#c2813a",
    "#7d8597",
    "#2a9d8f",
    "#a05195",
)
BAR, GAP, LINE = 18, 6, 26
CUT = 'style="fill:white"'
MOST_OVER = 1.1
"""A whisker's end, of the longest bar."""
TITLES = {
    "attention": "Attention, ms a call: less is better",
    "vae": "VAE, ms a picture: less is better",
    "image": "Whole images, s an image: less is better",
}
HISTORY_HEIGHT, HISTORY_TOP, MOST_LINES = 220, 44, 8
MOST_RUNS = 30


@dataclass(frozen=True)
class Layout:
    """How wide a plot is, in pixels. `left`: of the bars, which have their names beside them; 0 for
    above them. `right`: what is left for the figures. `letters`: of a line.
    """

    width: int
    left: int
    right: int
    letters: int


WIDE, SLIM = Layout(640, 230, 110, 90), Layout(330, 0, 100, 46)
"""For a window, and for a telephone."""


def bars(document: Document, layout: Layout = WIDE) -> dict[str, str]:
    """An SVG per test that has a figure: a group of bars per case, a bar per method."""
    found = {}
    for test, title in TITLES.items():
        rows = [row for row in document.rows if row.test == test and row.unit != "it/s"]
        if any(row.median > 0 for row in rows):
            found[test] = chart(title, rows, OURS[test], layout)
    return found


def chart(
    title: str,
    rows: Sequence[Row],
    first: str,
    layout: Layout = WIDE,
    limits: Mapping[str, float] | None = None,
) -> str:
    """An SVG with a group of bars per case; `first` is the method that has the first colour.

    `limits`: by case, at what a longer bar ends; with them it stands on white, as a file of its own
    does.
    """
    colours = _colours([row.method for row in rows], first)
    parts = [_title(title, layout)]
    y = 34.0
    for case in dict.fromkeys(row.case for row in rows):
        group = [row for row in rows if row.case == case]
        most = max((row.median for row in group if row.median > 0), default=1.0)
        most = min(most, (limits or {}).get(case, most))
        parts.append(_text(0, y + 14, _cut(case, layout.letters), weight="bold"))
        y += LINE
        for row in group:
            if not layout.left:
                parts.append(_text(0, y + 13, _cut(row.method, layout.letters)))
                y += BAR
            parts += _bar(row, y, most, colours[row.method], layout)
            y += BAR + GAP
        y += GAP
    label = f"{title}. " + "; ".join(_spoken(row) for row in rows if row.median > 0)
    if limits is not None:
        parts.insert(0, f'<rect width="{layout.width}" height="{y:.0f}" style="fill:white"/>')
    return _svg(layout.width, y, parts, label)


def _bar(row: Row, y: float, most: float, colour: str, layout: Layout) -> Iterator[str]:
    """A method's bar with a whisker from p10 to p90, or why there is none; its name beside it."""
    left = layout.left
    if left:
        yield _text(left - 8, y + 13, _cut(row.method, 34), "end")
    if not row.median > 0:
        reason = _cut(row.reason or "not measured", min(layout.letters, 60))
        yield _text(left, y + 13, reason, faint=True)
        return
    room = layout.width - left - layout.right
    length = max(min(row.median / most, MOST_OVER) * room, 1.0)
    tip = escape(f"{row.case}, {row.method}: {_figure(row)}, {row.runs} runs")
    yield (
        f'<rect x="{left}" y="{y:.1f}" width="{length:.1f}" height="{BAR}" rx="2" '
        f'style="fill:{colour}"><title>{tip}</title></rect>'
    )
    if row.median / most > MOST_OVER:  # it is longer than that
        yield f'<rect x="{left + length - 16:.1f}" y="{y:.1f}" width="4" height="{BAR}" {CUT}/>'
    spread = [value / most for value in (row.p10, row.p90) if value > 0]
    ends = [min(value, MOST_OVER) * room + left for value in spread]
    if len(ends) == 2 and ends[1] - ends[0] > 2:
        yield _line(ends[0], y + BAR / 2, ends[1], y + BAR / 2)
    end = max([left + length, *ends])
    yield _text(end + 6, y + 13, _figure(row))


def _figure(row: Row) -> str:
    return f"{number(row.median)} {row.unit}"


def number(value: float) -> str:
    """Three significant digits, without an exponent where people write none."""
    if not math.isfinite(value):
        return ""
    if value >= 100:
        return f"{value:.0f}"
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{min(max(digits, 0), 6)}f}"


def _spoken(row: Row) -> str:
    return f"{row.case}, {row.method}: {_figure(row)}"


def history(documents: Sequence[Document], layout: Layout = WIDE) -> str:
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
    parts = [_title("Time, % of the first run here: less is better", layout)]
    parts += _axes(frame, shown)
    for place, line in enumerate(lines):
        colour = _colour(place)
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
        name = _cut(line.name, layout.letters - 12)
        parts.append(_text(20, top, f"{name}: {line.points[-1][1]:.0f} % now"))
    label = "; ".join(f"{line.name}: {line.points[-1][1]:.0f} % of the first run" for line in lines)
    height = frame.bottom + 50 + 20 * len(lines)
    return _svg(layout.width, height, parts, f"History. {label}")


@dataclass(frozen=True)
class _Line:
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


def _lines(documents: Sequence[Document]) -> list[_Line]:
    """Of the cases measured most often, ours alone."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for place, document in enumerate(documents):
        for test in TITLES:
            for row in ours(document.rows, test):
                if row.unit != "it/s":
                    found.setdefault((test, row.case), []).append((place, row.median))
    often = sorted((item for item in found.items() if len(item[1]) > 1), key=lambda i: -len(i[1]))
    return [
        _Line(
            f"{test}, {_cut(case, 60)}", [(at, 100 * value / points[0][1]) for at, value in points]
        )
        for (test, case), points in often[:MOST_LINES]
    ]


def _axes(frame: _Frame, documents: Sequence[Document]) -> Iterator[str]:
    for share in range(5):
        value = frame.low + share / 4 * (frame.high - frame.low)
        y = frame.y(value)
        yield _line(frame.left, y, frame.right, y, 0.25)
        yield _text(frame.left - 6, y + 4, f"{value:.0f} %", "end", faint=True)
    last = len(documents) - 1
    for place, anchor in ((0, "start"), (last, "end")):
        yield _text(frame.x(place), frame.bottom + 18, documents[place].date[:10], anchor, True)


def _title(text: str, layout: Layout) -> str:
    return _text(0, 18, text, size=15 if layout.left else 13, weight="bold")


def _colours(names: Sequence[str], first: str) -> Mapping[str, str]:
    """Ours is the first colour in every plot, and nobody else's."""
    rest = [name for name in dict.fromkeys(names) if name != first]
    others = {name: _colour(1 + place % (len(COLOURS) - 1)) for place, name in enumerate(rest)}
    return {first: _colour(0), **others}


def _colour(place: int) -> str:
    place %= len(COLOURS)
    return f"var(--rocm-sd-plot-{place + 1},{COLOURS[place]})"


def _svg(width: int, height: float, parts: Sequence[str], label: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" role="img" '
        f'style="width:100%;max-width:{width}px;height:auto" font-family="sans-serif" '
        f'font-size="13" fill="currentColor" aria-label="{escape(label)}">'
    )
    return "\n".join([head, *parts, "</svg>"])


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _line(x: float, y: float, to_x: float, to_y: float, opacity: float = 0.8) -> str:
    ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return f'<line {ends} stroke="currentColor" stroke-opacity="{opacity}"/>'


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    faint: bool = False,
    size: int = 13,
    weight: str = "normal",
) -> str:
    """Faint text is set apart by its slant, so that it is read as well as any."""
    style = ' font-style="italic"' if faint else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}"{style}>{escape(text)}</text>'
    )
