"""Draw docs/images/tiny-sd-grid.png: sixteen prompts and what models/tiny-sd makes of them.

python -m tools.make_grid
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = (
    "a red circle left of a blue square",
    "a big yellow star on a blue background",
    "a small green triangle above a big orange ring",
    "a purple heart in the center on a white background",
    "a white cross on the right on a red background",
    "a black diamond inside a big yellow circle",
    "a small orange square at the top on a purple background",
    "a blue ring right of a green star",
    "a big red heart on the left",
    "a yellow triangle below a purple diamond on a black background",
    "a small white circle inside a red square on a green background",
    "a green cross at the bottom on an orange background",
    "an orange star left of a black heart on a white background",
    "a big blue square in the center on a yellow background",
    "a small purple ring above a small red triangle",
    "a big green diamond on a white background",
)


def grid(pictures: list[Image.Image], prompts: list[str], columns: int, cell: int) -> Image.Image:
    """Pictures in rows of `columns`, each `cell` pixels wide with its prompt below."""
    caption, gap = 44, 8
    rows = -(-len(pictures) // columns)
    width, height = columns * (cell + gap) + gap, rows * (cell + caption + gap) + gap
    sheet = Image.new("RGB", (width, height), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for index, (picture, prompt) in enumerate(zip(pictures, prompts, strict=True)):
        x = gap + index % columns * (cell + gap)
        y = gap + index // columns * (cell + caption + gap)
        sheet.paste(picture.resize((cell, cell), Image.Resampling.LANCZOS), (x, y))
        text = "\n".join(textwrap.wrap(prompt, cell // 6))
        draw.text((x, y + cell + 4), text, fill="black", font=font)
    return sheet


def main(argv: list[str]) -> int:
    """Generate and draw. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "models/tiny-sd")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images/tiny-sd-grid.png")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    pipeline = StableDiffusionPipeline.from_pretrained(
        args.model, local_files_only=True, safety_checker=None, torch_dtype=torch.float32
    ).to(args.device)
    generators = [torch.Generator().manual_seed(args.seed + index) for index in range(len(PROMPTS))]
    pictures = pipeline(
        list(PROMPTS),
        num_inference_steps=args.steps,
        guidance_scale=args.guidance,
        generator=generators,
    ).images
    args.out.parent.mkdir(parents=True, exist_ok=True)
    grid(pictures, list(PROMPTS), columns=4, cell=176).save(args.out, optimize=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
