"""The plot of `bench vae`: memory and time over the size, both axes logarithmic, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from lib_rocm_sd.lab import svg
from lib_rocm_sd.lab.rows import Row
from lib_rocm_sd.lab.vae_ways import WAYS

WIDTH, HEIGHT, TOP, LEFT, BOTTOM, SPACE, LEGEND = 480, 380, 64, 64, 44, 60, 240
COLOURS = (
    "#b3261e",
    "#e4572e",
    "#f29e4c",
    "#7a1f5c",
    "#3b6ea5",
    "#2a9d8f",
    "#7d8597",
    "#a3a847",
    "#1d3557",
)
"""One per way, ours the warm ones."""
DARK, GREY, GRID = "#181a1e", "#60646c", "#e3e5e8"


def draw(rows: Sequence[Row], device: str, role: str = "decoder") -> str:
    """The SVG: peak MiB and median ms of each way over the side in pixels."""
    shown = [row for row in rows if row.role == role and not row.reason]
    present = {row.way for row in shown}
    styles = [
        (way.name, colour, 2.6 if way.level else 1.4)
        for way, colour in zip(WAYS, COLOURS, strict=True)
        if way.name in present
    ]
    total = LEFT + 2 * WIDTH + SPACE + LEGEND
    height = TOP + HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{total}" height="{height}" fill="white"/>',
        _text(LEFT, 24, f"VAE {role}, batch 1, {device}", "start", DARK, 16),
    ]
    plots = (("peak MiB over the weights", "peak_mib"), ("time, ms", "median"))
    for place, (title, name) in enumerate(plots):
        points = [(row.way, row.size, getattr(row, name)) for row in shown]
        usable = [point for point in points if math.isfinite(point[2]) and point[2] > 0]
        frame = _frame(shown, usable, LEFT + place * (WIDTH + SPACE))
        parts += _grid(frame, title)
        for way, colour, thick in styles:
            own = sorted((size, value) for name, size, value in usable if name == way)
            places = [(frame.x(math.log2(x)), frame.y(math.log10(y))) for x, y in own]
            parts += svg.curve(places, colour, thick, 3.5)
    left = LEFT + 2 * WIDTH + SPACE + 16
    for place, (way, colour, thick) in enumerate(styles):
        y = TOP + 14 + 22 * place
        parts.append(_line(left, y, left + 22, y, colour, thick))
        parts.append(_text(left + 30, y + 4, way, "start", DARK))
    return "\n".join([*parts, "</svg>", ""])


def _frame(rows: Sequence[Row], points: Sequence[tuple[str, int, float]], left: int) -> svg.Frame:
    """A plot over powers of 2 (sizes) and whole ones of 10 (values)."""
    sizes = [math.log2(row.size) for row in rows] or [9.0]
    values = [math.log10(value) for *_, value in points] or [0.0]
    low, high = math.floor(min(values)), math.ceil(max(values))
    ends = (min(sizes) - 0.25, max(sizes) + 0.25), (low, max(high, low + 1))
    return svg.Frame(left, left + WIDTH, TOP, TOP + HEIGHT, *ends)


def _grid(frame: svg.Frame, title: str) -> Iterator[str]:
    """Title, grid and ticks."""
    (low, high), (least, most) = frame.x_ends, frame.y_ends
    yield _text(frame.left, TOP - 10, title, "start", DARK, 14)
    for power in range(int(least), int(most) + 1):
        y = frame.y(power)
        yield _line(frame.left, y, frame.right, y)
        yield _text(frame.left - 6, y + 4, f"{10.0**power:g}", "end", GREY)
    for power in range(math.ceil(low), math.floor(high) + 1):
        x = frame.x(power)
        yield _line(x, TOP, x, frame.bottom)
        yield _text(x, frame.bottom + 18, f"{2**power}", "middle", GREY)
    middle = (frame.left + frame.right) / 2
    yield _text(middle, frame.bottom + 36, "pixels a side", "middle", GREY)


def _line(
    x: float, y: float, to_x: float, to_y: float, colour: str = GRID, thick: float = 1
) -> str:
    ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{thick}"/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str, size: int | None = None) -> str:
    font = "" if size is None else f' font-size="{size}"'
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{font}>'
        f"{escape(text)}</text>"
    )
