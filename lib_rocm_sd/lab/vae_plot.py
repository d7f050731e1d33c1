"""The plot of `bench vae`: memory and time over the size, both axes logarithmic, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

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
FAINT = 0.15


def draw(rows: Sequence[Row], device: str, role: str = "decoder") -> str:
    """The SVG: peak MiB and median ms of each way over the side in pixels."""
    shown = [row for row in rows if row.role == role and not row.reason]
    present = {row.way for row in shown}
    styles = [
        (way.name, colour, 2.6 if way.level else 1.4)
        for way, colour in zip(WAYS, COLOURS, strict=True)
        if way.name in present
    ]
    total, height = LEFT + 2 * WIDTH + SPACE + LEGEND, TOP + HEIGHT + BOTTOM
    title = f"VAE {role}, batch 1, {device}"
    parts = [
        f'<rect width="{total}" height="{height}" style="fill:white"/>',
        svg.text_at(LEFT, 24, title, size=16),
    ]
    plots = (("peak MiB over the weights", "peak_mib"), ("time, ms", "median"))
    for place, (what, name) in enumerate(plots):
        points = [(row.way, row.size, getattr(row, name)) for row in shown]
        usable = [point for point in points if math.isfinite(point[2]) and point[2] > 0]
        frame = _frame(shown, usable, LEFT + place * (WIDTH + SPACE))
        parts += _grid(frame, what)
        for way, colour, thick in styles:
            own = sorted((size, value) for name, size, value in usable if name == way)
            places = [(frame.x(math.log2(x)), frame.y(math.log10(y))) for x, y in own]
            parts += svg.curve(places, colour, thick, 3.5)
    left = LEFT + 2 * WIDTH + SPACE + 16
    for place, (way, colour, thick) in enumerate(styles):
        y = TOP + 14 + 22 * place
        size = f'x="{left}" y="{y - thick / 2:.1f}" width="22" height="{thick}"'
        parts.append(f'<rect {size} style="fill:{colour}"/>')
        parts.append(svg.text_at(left + 30, y + 4, way))
    return svg.drawing(total, height, parts, title) + "\n"


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
    yield svg.text_at(frame.left, TOP - 10, title, size=14)
    for power in range(int(least), int(most) + 1):
        y = frame.y(power)
        yield svg.line(frame.left, y, frame.right, y, FAINT)
        yield svg.text_at(frame.left - 6, y + 4, f"{10.0**power:g}", "end")
    for power in range(math.ceil(low), math.floor(high) + 1):
        x = frame.x(power)
        yield svg.line(x, TOP, x, frame.bottom, FAINT)
        yield svg.text_at(x, frame.bottom + 18, f"{2**power}", "middle")
    middle = (frame.left + frame.right) / 2
    yield svg.text_at(middle, frame.bottom + 36, "pixels a side", "middle")
