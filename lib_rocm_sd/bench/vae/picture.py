"""The picture: our whole frame, and how our bands and the two tilings differ from it, amplified."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

from lib_rocm_sd.bench.vae.coders import Coder, structured_latent
from lib_rocm_sd.bench.vae.measure import FAILED, clean, why
from lib_rocm_sd.bench.vae.ways import WAYS, Runner
from lib_rocm_sd.vae.program import Program

SIZE, SMALL_SIZE = 1536, 128
AMPLIFIED = 4
CELL, GAP, CAPTION, HEAD = 512, 16, 44, 36
INK, PAPER, FAINT = (24, 26, 30), (255, 255, 255), (96, 100, 108)
DEVIATIONS = 3.0
"""Black to white is the whole frame's mean less, and plus, this many standard deviations."""

TILINGS = ("overlap-blend", "per-tile-norm")


@dataclass(frozen=True)
class Panel:
    """A picture (H, W, 3) of bytes, None where it failed, with two lines above it."""

    title: str
    detail: str
    pixels: torch.Tensor | None


def draw(coder: Coder, file: Path) -> None:
    """Decode and write the picture; what it shows also goes to stderr in words."""
    size = SMALL_SIZE if coder.small else SIZE
    panels = decoded(coder, structured_latent(size, size).to(coder.device, coder.dtype))
    dtype = str(coder.dtype).removeprefix("torch.")
    head = f"{size} x {size} pixels, random weights, {dtype}; differences x {AMPLIFIED}"
    sheet(head, panels).save(file)
    for panel in panels:
        print(f"{panel.title}: {panel.detail}", file=sys.stderr, flush=True)


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
    yield "ours, in bands", Runner(in_bands, lambda: str(program.last_plan))
    for way in WAYS:
        if way.key in TILINGS:
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


def sheet(head: str, panels: list[Panel]) -> Image.Image:
    """The panels side by side in two columns."""
    rows = -(-len(panels) // 2)
    size = (2 * CELL + 3 * GAP, HEAD + rows * (CELL + CAPTION + GAP))
    image = Image.new("RGB", size, PAPER)
    pen = ImageDraw.Draw(image)
    pen.text((GAP, 10), head, fill=FAINT, font=_font(15))
    for place, panel in enumerate(panels):
        left = GAP + place % 2 * (CELL + GAP)
        top = HEAD + place // 2 * (CELL + CAPTION + GAP)
        pen.text((left, top), panel.title, fill=INK, font=_font(17))
        pen.text((left, top + 22), panel.detail, fill=FAINT, font=_font(13))
        if panel.pixels is not None:
            cell = Image.fromarray(panel.pixels.numpy()).resize((CELL, CELL), Image.Resampling.BOX)
            image.paste(cell, (left, top + CAPTION))
    return image


def _font(size: int) -> Any:
    """The font that comes with Pillow; before 10.1 it has one size."""
    try:
        return ImageFont.load_default(size)
    except TypeError:
        return ImageFont.load_default()
