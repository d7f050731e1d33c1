"""Pictures of `bench vae`: memory and time over the size as SVG, both axes logarithmic, which needs
no library; and our whole frame with how our bands and the two tilings differ from it, amplified,
which needs Pillow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd.lab.models import Coder, Runner, structured_latent
from lib_rocm_sd.lab.rows import Row, say
from lib_rocm_sd.lab.timing import FAILED, clean, why
from lib_rocm_sd.lab.vae_ways import WAYS
from lib_rocm_sd.vae.program import Program

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


@dataclass(frozen=True)
class _Axes:
    """One plot. `left` is that of its frame; ranges are powers of 2 (sizes) and 10 (values)."""

    title: str
    value: Callable[[Row], float]
    left: int
    sizes: tuple[float, float]
    values: tuple[int, int]

    def x(self, size: float) -> float:
        low, high = self.sizes
        return self.left + (math.log2(size) - low) / (high - low) * WIDTH

    def y(self, value: float) -> float:
        low, high = self.values
        return TOP + HEIGHT - (math.log10(value) - low) / (high - low) * HEIGHT


def draw(rows: Sequence[Row], device: str, role: str = "decoder") -> str:
    """The SVG: peak MiB and median ms of each way over the side in pixels."""
    shown = [row for row in rows if row.role == role and not row.reason]
    total = LEFT + 2 * WIDTH + SPACE + LEGEND
    height = TOP + HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{total}" height="{height}" fill="white"/>',
        _text(LEFT, 24, f"VAE {role}, batch 1, {device}", "start", DARK, 16),
    ]
    for place, (title, value) in enumerate(
        (("peak MiB over the weights", _peak), ("time, ms", lambda row: row.median))
    ):
        axes = _axes(title, value, shown, LEFT + place * (WIDTH + SPACE))
        parts += _frame(axes) + _curves(axes, shown)
    return "\n".join([*parts, *_legend(shown, LEFT + 2 * WIDTH + SPACE + 16), "</svg>", ""])


def _peak(row: Row) -> float:
    return row.peak_mib


def _usable(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _axes(title: str, value: Callable[[Row], float], rows: Sequence[Row], left: int) -> _Axes:
    sizes = [math.log2(row.size) for row in rows] or [9.0]
    values = [math.log10(value(row)) for row in rows if _usable(value(row))] or [0.0]
    low, high = math.floor(min(values)), math.ceil(max(values))
    ends = (min(sizes) - 0.25, max(sizes) + 0.25)
    return _Axes(title, value, left, ends, (low, max(high, low + 1)))


def _frame(axes: _Axes) -> list[str]:
    """Title, grid and ticks."""
    right, bottom = axes.left + WIDTH, TOP + HEIGHT
    parts = [_text(axes.left, TOP - 10, axes.title, "start", DARK, 14)]
    for power in range(axes.values[0], axes.values[1] + 1):
        y = axes.y(10.0**power)
        parts.append(_line(axes.left, y, right, y))
        parts.append(_text(axes.left - 6, y + 4, f"{10.0**power:g}", "end", GREY))
    for power in range(math.ceil(axes.sizes[0]), math.floor(axes.sizes[1]) + 1):
        x = axes.x(2.0**power)
        parts.append(_line(x, TOP, x, bottom))
        parts.append(_text(x, bottom + 18, f"{2**power}", "middle", GREY))
    parts.append(_text((axes.left + right) / 2, bottom + 36, "pixels a side", "middle", GREY))
    return parts


def _curves(axes: _Axes, rows: Sequence[Row]) -> list[str]:
    parts = []
    for way, colour, thick in _styles(rows):
        points = sorted(
            (row.size, axes.value(row))
            for row in rows
            if row.way == way and _usable(axes.value(row))
        )
        places = [(axes.x(size), axes.y(value)) for size, value in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{thick}"/>'
        )
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in places]
    return parts


def _styles(rows: Sequence[Row]) -> list[tuple[str, str, float]]:
    """Name, colour and stroke of each way that has a row."""
    present = {row.way for row in rows}
    return [
        (way.name, colour, 2.6 if way.level else 1.4)
        for way, colour in zip(WAYS, COLOURS, strict=True)
        if way.name in present
    ]


def _legend(rows: Sequence[Row], left: float) -> list[str]:
    parts = []
    for place, (name, colour, thick) in enumerate(_styles(rows)):
        y = TOP + 14 + 22 * place
        parts.append(_line(left, y, left + 22, y, colour, thick))
        parts.append(_text(left + 30, y + 4, name, "start", DARK))
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


# -- the picture ----------------------------------------------------------------------------------


SIZE, SMALL_SIZE = 1536, 128
AMPLIFIED = 4
CELL, GAP, CAPTION, TITLE = 512, 16, 44, 36
INK, PAPER, FAINT = (24, 26, 30), (255, 255, 255), (96, 100, 108)
DEVIATIONS = 3.0
"""Black to white is the whole frame's mean less, and plus, this many standard deviations."""

TILED = ("overlap-blend", "per-tile-norm")


@dataclass(frozen=True)
class Panel:
    """A picture (H, W, 3) of bytes, None where it failed, with two lines above it."""

    title: str
    detail: str
    pixels: torch.Tensor | None


def picture(coder: Coder, file: Path) -> None:
    """Decode and write the picture; what it shows also goes to stderr in words."""
    size = SMALL_SIZE if coder.small else SIZE
    panels = decoded(coder, structured_latent(size, size).to(coder.device, coder.dtype))
    dtype = str(coder.dtype).removeprefix("torch.")
    head = f"{size} x {size} pixels, random weights, {dtype}; differences x {AMPLIFIED}"
    sheet(head, panels).save(file)
    for panel in panels:
        say(f"{panel.title}: {panel.detail}")


def decoded(coder: Coder, latent: torch.Tensor) -> list[Panel]:
    """The whole frame, then how the others differ from it."""
    program = Program(coder.module)
    with torch.no_grad():
        whole = program(latent, mode="whole")
        values = whole.float()
        low, high = _range(values)
        frame = _bytes(values, low, high)
        panels = [Panel("ours, whole frame", str(program.last_plan or ""), frame)]
        for title, runner in _others(coder, program):
            try:
                pixels = _bytes(runner.call(latent).float(), low, high)
                panels.append(_difference(title, runner.plan(), frame, pixels))
            except FAILED as failure:
                panels.append(Panel(title, why(failure), None))
            clean(coder.device)
    return panels


def _others(coder: Coder, program: Program) -> Iterator[tuple[str, Runner]]:
    """Ours in bands, and the tilings."""
    in_bands = partial(program, mode="banded")
    yield "ours, in bands", Runner(in_bands, plan=lambda: str(program.last_plan))
    for way in WAYS:
        if way.key in TILED:
            with way.make(coder) as runner:
                yield way.name, runner


def _range(values: torch.Tensor) -> tuple[float, float]:
    mean, spread = float(values.mean()), DEVIATIONS * float(values.std())
    return mean - spread, mean + spread


def _bytes(values: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """(1, 3, H, W) to (H, W, 3) bytes on the CPU."""
    scaled = ((values[0] - low) * (255 / (high - low))).round_().clamp_(0, 255)
    return scaled.to(torch.uint8).permute(1, 2, 0).cpu()


def _difference(title: str, plan: str, frame: torch.Tensor, other: torch.Tensor) -> Panel:
    gap = (other.short() - frame.short()).abs()
    share = float((gap > 0).sum()) / gap.numel()
    detail = f"{plan}; up to {int(gap.max())}/255, {share:.2%} of the values differ"
    return Panel(title, detail, (gap * AMPLIFIED).clamp_(0, 255).to(torch.uint8))


def sheet(head: str, panels: list[Panel]) -> Any:
    """The panels side by side in two columns, as an image of Pillow's."""
    from PIL import Image, ImageDraw

    rows = -(-len(panels) // 2)
    size = (2 * CELL + 3 * GAP, TITLE + rows * (CELL + CAPTION + GAP))
    image = Image.new("RGB", size, PAPER)
    pen = ImageDraw.Draw(image)
    pen.text((GAP, 10), head, fill=FAINT, font=_font(15))
    for place, panel in enumerate(panels):
        left = GAP + place % 2 * (CELL + GAP)
        top = TITLE + place // 2 * (CELL + CAPTION + GAP)
        pen.text((left, top), panel.title, fill=INK, font=_font(17))
        pen.text((left, top + 22), panel.detail, fill=FAINT, font=_font(13))
        if panel.pixels is not None:
            cell = Image.fromarray(panel.pixels.numpy()).resize((CELL, CELL), Image.Resampling.BOX)
            image.paste(cell, (left, top + CAPTION))
    return image


def _font(size: int) -> Any:
    """The font that comes with Pillow; before 10.1 it has one size."""
    from PIL import ImageFont

    try:
        return ImageFont.load_default(size)
    except TypeError:
        return ImageFont.load_default()
