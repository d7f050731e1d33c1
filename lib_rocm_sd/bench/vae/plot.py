"""Memory and time over the size as an SVG, both axes logarithmic; needs no library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from lib_rocm_sd.bench.vae.result import VaeRow
from lib_rocm_sd.bench.vae.ways import WAYS

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
INK, FAINT, GRID = "#181a1e", "#60646c", "#e3e5e8"


@dataclass(frozen=True)
class _Panel:
    """One plot. `left` is that of its frame; ranges are powers of 2 (sizes) and 10 (values)."""

    title: str
    value: Callable[[VaeRow], float]
    left: int
    sizes: tuple[float, float]
    values: tuple[int, int]

    def x(self, size: float) -> float:
        low, high = self.sizes
        return self.left + (math.log2(size) - low) / (high - low) * WIDTH

    def y(self, value: float) -> float:
        low, high = self.values
        return TOP + HEIGHT - (math.log10(value) - low) / (high - low) * HEIGHT


def draw(rows: Sequence[VaeRow], device: str, role: str = "decoder") -> str:
    """The SVG: peak MiB and median ms of each way over the side in pixels."""
    shown = [row for row in rows if row.role == role and not row.reason]
    total = LEFT + 2 * WIDTH + SPACE + LEGEND
    height = TOP + HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{total}" height="{height}" fill="white"/>',
        _text(LEFT, 24, f"VAE {role}, batch 1, {device}", "start", INK, 16),
    ]
    for place, (title, value) in enumerate(
        (("peak MiB over the weights", _peak), ("time, ms", lambda row: row.median_ms))
    ):
        panel = _panel(title, value, shown, LEFT + place * (WIDTH + SPACE))
        parts += _frame(panel) + _curves(panel, shown)
    return "\n".join([*parts, *_legend(shown, LEFT + 2 * WIDTH + SPACE + 16), "</svg>", ""])


def _peak(row: VaeRow) -> float:
    return row.peak_mib


def _usable(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _panel(
    title: str, value: Callable[[VaeRow], float], rows: Sequence[VaeRow], left: int
) -> _Panel:
    sizes = [math.log2(row.size) for row in rows] or [9.0]
    values = [math.log10(value(row)) for row in rows if _usable(value(row))] or [0.0]
    low, high = math.floor(min(values)), math.ceil(max(values))
    ends = (min(sizes) - 0.25, max(sizes) + 0.25)
    return _Panel(title, value, left, ends, (low, max(high, low + 1)))


def _frame(panel: _Panel) -> list[str]:
    """Title, grid and ticks."""
    right, bottom = panel.left + WIDTH, TOP + HEIGHT
    parts = [_text(panel.left, TOP - 10, panel.title, "start", INK, 14)]
    for power in range(panel.values[0], panel.values[1] + 1):
        y = panel.y(10.0**power)
        parts.append(_line(panel.left, y, right, y))
        parts.append(_text(panel.left - 6, y + 4, f"{10.0**power:g}", "end", FAINT))
    for power in range(math.ceil(panel.sizes[0]), math.floor(panel.sizes[1]) + 1):
        x = panel.x(2.0**power)
        parts.append(_line(x, TOP, x, bottom))
        parts.append(_text(x, bottom + 18, f"{2**power}", "middle", FAINT))
    parts.append(_text((panel.left + right) / 2, bottom + 36, "pixels a side", "middle", FAINT))
    return parts


def _curves(panel: _Panel, rows: Sequence[VaeRow]) -> list[str]:
    parts = []
    for way, colour, thick in _styles(rows):
        points = sorted(
            (row.size, panel.value(row))
            for row in rows
            if row.way == way and _usable(panel.value(row))
        )
        places = [(panel.x(size), panel.y(value)) for size, value in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{thick}"/>'
        )
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in places]
    return parts


def _styles(rows: Sequence[VaeRow]) -> list[tuple[str, str, float]]:
    """Name, colour and stroke of each way that has a row."""
    present = {row.way for row in rows}
    return [
        (way.name, colour, 2.6 if way.level else 1.4)
        for way, colour in zip(WAYS, COLOURS, strict=True)
        if way.name in present
    ]


def _legend(rows: Sequence[VaeRow], left: float) -> list[str]:
    parts = []
    for place, (name, colour, thick) in enumerate(_styles(rows)):
        y = TOP + 14 + 22 * place
        parts.append(_line(left, y, left + 22, y, colour, thick))
        parts.append(_text(left + 30, y + 4, name, "start", INK))
    return parts


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
