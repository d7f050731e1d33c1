"""Pictures of `bench vae`: memory and time over the size as SVG, both axes logarithmic, which needs
no library; and our whole frame with how our bands and the two tilings differ from it, amplified,
which needs Pillow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd.lab import svg
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
