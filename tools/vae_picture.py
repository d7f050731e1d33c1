"""Draw docs/images/vae-h200.jpg: our whole frame of a VAE's decode, and how our bands and two
tilings of others differ from it, amplified.

python -m tools.vae_picture --out FILE
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import nn

from lib_rocm_sd.catalog.unet import FACTOR
from lib_rocm_sd.commands.support import add_device, device_of
from lib_rocm_sd.lab import models
from lib_rocm_sd.lab.models import Coder, Runner
from lib_rocm_sd.lab.timing import FAILED, clean, why
from lib_rocm_sd.lab.vae_ways import WAYS
from lib_rocm_sd.vae.program import Program

SIZE, SMALL_SIZE = 1536, 128
ROOT = Path(__file__).resolve().parent.parent
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


def sheet(head: str, panels: list[Panel]) -> Image.Image:
    """The panels side by side in two columns."""
    rows = -(-len(panels) // 2)
    size = (2 * CELL + 3 * GAP, TITLE + rows * (CELL + CAPTION + GAP))
    image = Image.new("RGB", size, PAPER)
    pen = ImageDraw.Draw(image)
    pen.text((GAP, 10), head, fill=FAINT, font=ImageFont.load_default(15))
    for place, panel in enumerate(panels):
        left = GAP + place % 2 * (CELL + GAP)
        top = TITLE + place // 2 * (CELL + CAPTION + GAP)
        pen.text((left, top), panel.title, fill=INK, font=ImageFont.load_default(17))
        pen.text((left, top + 22), panel.detail, fill=FAINT, font=ImageFont.load_default(13))
        if panel.pixels is not None:
            cell = Image.fromarray(panel.pixels.numpy()).resize((CELL, CELL), Image.Resampling.BOX)
            image.paste(cell, (left, top + CAPTION))
    return image


def structured_latent(height: int, width: int) -> torch.Tensor:
    """A latent (1, 4, height / 8, width / 8) with regions unlike each other, as pictures have.

    Smooth gradients, a quiet disc, a lively stripe: a tile's statistics are not the whole's.
    """
    rows, columns = height // FACTOR, width // FACTOR
    generator = torch.Generator("cpu").manual_seed(7)
    coarse = torch.randn((1, 4, 6, 6), generator=generator)
    size = (rows, columns)
    smooth = nn.functional.interpolate(coarse, size=size, mode="bicubic", align_corners=True)
    fine = torch.randn((1, 4, rows, columns), generator=generator)
    y = torch.linspace(-1, 1, rows)[:, None]
    x = torch.linspace(-1, 1, columns)[None, :]
    disc = ((x + 0.35) ** 2 + (y + 0.2) ** 2 < 0.2).float()
    stripe = ((x - y) > 0.9).float()
    return smooth * (1 - disc) + disc * smooth.mean() + fine * (0.15 + 0.6 * stripe - 0.12 * disc)


def main(argv: list[str]) -> int:
    """Decode and write the picture; what it shows is printed in words, too. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_device(parser)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--small", action="store_true", help="of few channels: seconds")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "vae.jpg")
    args = parser.parse_args(argv)
    coder = models.coder("decoder", device_of(args), getattr(torch, args.dtype), args.small)
    size = SMALL_SIZE if coder.small else SIZE
    panels = decoded(coder, structured_latent(size, size).to(coder.device, coder.dtype))
    head = f"{size} x {size} pixels, random weights, {args.dtype}; differences x {AMPLIFIED}"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    sheet(head, panels).save(args.out)
    for panel in panels:
        print(f"{panel.title}: {panel.detail}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
