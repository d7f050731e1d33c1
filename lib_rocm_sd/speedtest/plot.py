"""The plots of a speed test, as SVG text to stand inside a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from lib_rocm_sd.lab import svg
from lib_rocm_sd.lab.rows import Row
from lib_rocm_sd.lab.svg import SLIM, WIDE, Layout, number
from lib_rocm_sd.speedtest.result import OURS, Document, SpeedRow, ours

__all__ = ["SLIM", "WIDE", "bars", "history", "number"]

TITLES = {
    "attention": "Attention, ms a call: less is better",
    "vae": "VAE, ms a picture: less is better",
    "step": "Denoising step, ms: less is better",
    "image": "Whole images, s an image: less is better",
}
HISTORY_HEIGHT, HISTORY_TOP, MOST_LINES = 220, 44, 8
MOST_RUNS = 30


def bars(document: Document, layout: Layout = WIDE) -> dict[str, str]:
    """An SVG per test that has a figure: a group of bars per case, a bar per method."""
    found = {}
    for test, title in TITLES.items():
        rows = [row for row in document.rows if row.test == test and row.unit != "it/s"]
        if any(row.median > 0 for row in rows):
            found[test] = svg.chart(title, [_bar(row) for row in rows], OURS[test], layout)
    return found


def _bar(row: SpeedRow) -> Row:
    figures = (row.unit, row.median, row.p10, row.p90, row.runs)
    return Row(row.test, row.case, row.method, *figures, reason=row.reason)


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
