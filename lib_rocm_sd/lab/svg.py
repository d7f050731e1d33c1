"""Rows as bars in SVG text, and the pieces that other plots are made of.

They stand inside a page, light or dark by currentColor. Colours may be set by the CSS variables
--rocm-sd-plot-1 (ours) to -8. All text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from lib_rocm_sd.lab.rows import Row

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
BAR, GAP, LINE, LETTER = 18, 6, 26, 7
CUT = 'style="fill:white"'
MOST_OVER = 1.1
"""A whisker's end, of the longest bar."""


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


def chart(
    title: str,
    bars: Sequence[Row],
    first: str,
    layout: Layout = WIDE,
    limits: Mapping[str, float] | None = None,
    colours: Mapping[str, str] | None = None,
) -> str:
    """An SVG with a group of bars per case; `first` is the way that has the first colour, unless
    `colours` has one for each way.

    `limits`: by case, at what a longer bar ends; with them it stands on white, as a file of its own
    does.
    """
    colours = colours or colours_of([bar.way for bar in bars], first)
    parts = [title_of(title, layout)]
    y = 34.0
    for case in dict.fromkeys(bar.case for bar in bars):
        group = [bar for bar in bars if bar.case == case]
        most = max((bar.median for bar in group if bar.median > 0), default=1.0)
        most = min(most, (limits or {}).get(case, most))
        if case:
            parts.append(text_at(0, y + 14, cut(case, layout.letters), weight="bold"))
            y += LINE
        for bar in group:
            if not layout.left:
                parts.append(text_at(0, y + 13, cut(bar.way, layout.letters)))
                y += BAR
            parts += _bar(bar, y, most, colours[bar.way], layout)
            y += BAR + GAP
        y += GAP
    spoken = (f"{bar.case}, {bar.way}: {_figure(bar)}" for bar in bars if bar.median > 0)
    label = f"{title}. " + "; ".join(spoken)
    if limits is not None:
        parts.insert(0, f'<rect width="{layout.width}" height="{y:.0f}" style="fill:white"/>')
    return drawing(layout.width, y, parts, label)


def _bar(bar: Row, y: float, most: float, colour: str, layout: Layout) -> Iterator[str]:
    """A row's bar with a whisker from p10 to p90, or why there is none; its name beside it."""
    left = layout.left
    if left:
        yield text_at(left - 8, y + 13, cut(bar.way, left // LETTER), "end")
    if not bar.median > 0:
        reason = cut(bar.reason or "not measured", min(layout.letters, 60))
        yield text_at(left, y + 13, reason, faint=True)
        return
    room = layout.width - left - layout.right
    length = max(min(bar.median / most, MOST_OVER) * room, 1.0)
    tip = escape(f"{bar.case}, {bar.way}: {_figure(bar)}, {bar.runs} runs")
    yield (
        f'<rect x="{left}" y="{y:.1f}" width="{length:.1f}" height="{BAR}" rx="2" '
        f'style="fill:{colour}"><title>{tip}</title></rect>'
    )
    if bar.median / most > MOST_OVER:  # it is longer than that
        yield f'<rect x="{left + length - 16:.1f}" y="{y:.1f}" width="4" height="{BAR}" {CUT}/>'
    spread = [value / most for value in (bar.p10, bar.p90) if value > 0]
    ends = [min(value, MOST_OVER) * room + left for value in spread]
    if len(ends) == 2 and ends[1] - ends[0] > 2:
        yield line(ends[0], y + BAR / 2, ends[1], y + BAR / 2)
    end = max([left + length, *ends])
    yield text_at(end + 6, y + 13, _figure(bar))


def _figure(bar: Row) -> str:
    return f"{number(bar.median)} {bar.unit}"


def number(value: float) -> str:
    """Three significant digits, without an exponent where people write none."""
    if not math.isfinite(value):
        return ""
    if value >= 100:
        return f"{value:.0f}"
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{min(max(digits, 0), 6)}f}"


def title_of(text: str, layout: Layout) -> str:
    """A plot's title, at its top."""
    return text_at(0, 18, text, size=15 if layout.left else 13, weight="bold")


def colours_of(ways: Sequence[str], first: str) -> dict[str, str]:
    """A colour for each way. The first is ours in every plot, nobody else's."""
    rest = [way for way in dict.fromkeys(ways) if way != first]
    others = {way: colour_of(1 + place % (len(COLOURS) - 1)) for place, way in enumerate(rest)}
    return {first: colour_of(0), **others}


def colour_of(place: int) -> str:
    """The colour of a number; a page may have others."""
    place %= len(COLOURS)
    return f"var(--rocm-sd-plot-{place + 1},{COLOURS[place]})"


def drawing(width: int, height: float, parts: Sequence[str], label: str) -> str:
    """The whole SVG; `label` is what a screen reader says."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" role="img" '
        f'style="width:100%;max-width:{width}px;height:auto" font-family="sans-serif" '
        f'font-size="13" fill="currentColor" aria-label="{escape(label)}">'
    )
    return "\n".join([head, *parts, "</svg>"])


def cut(text: str, most: int) -> str:
    """`text`, of at most so many letters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def line(x: float, y: float, to_x: float, to_y: float, opacity: float = 0.8) -> str:
    """A straight line, such as a whisker or an axis."""
    ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return f'<line {ends} stroke="currentColor" stroke-opacity="{opacity}"/>'


def polyline(places: Sequence[tuple[float, float]], colour: str) -> str:
    """A line through places in pixels."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline points="{path}" style="fill:none;stroke:{colour}" stroke-width="2"/>'


def curve(places: Sequence[tuple[float, float]], colour: str, tips: Sequence[str]) -> Iterator[str]:
    """A line through places in pixels, each with a dot that tells its tip when pointed at."""
    yield polyline(places, colour)
    for (x, y), tip in zip(places, tips, strict=True):
        dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" style="fill:{colour}"'
        yield f"{dot}><title>{escape(tip)}</title></circle>"


def text_at(
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
