"""The demo's picture: one row per prompt, without, with, and their difference made visible."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from lib_rocm_sd.demo.comparison import Sides

AMPLIFIED = 32
CELL, GAP, HEAD, CAPTION = 256, 16, 118, 30
INK, PAPER, FAINT = (24, 26, 30), (255, 255, 255), (112, 116, 124)


def draw(sides: Sequence[Sides], findings: dict[str, Any]) -> Image.Image:
    """The sheet. `findings` is the demo's report."""
    width = 3 * CELL + 4 * GAP
    sheet = Image.new("RGB", (width, HEAD + len(sides) * (CELL + CAPTION + GAP)), PAPER)
    pen = ImageDraw.Draw(sheet)
    _head(pen, findings, width)
    for row, side in enumerate(sides):
        top = HEAD + row * (CELL + CAPTION + GAP)
        pen.text((GAP, top), side.prompt, fill=INK, font=_font(15))
        for column, pixels in enumerate((side.without, side.with_, _visible(side))):
            picture = Image.fromarray(pixels).resize((CELL, CELL), Image.Resampling.LANCZOS)
            sheet.paste(picture, (GAP + column * (CELL + GAP), top + CAPTION - 6))
    return sheet


def _head(pen: ImageDraw.ImageDraw, findings: dict[str, Any], width: int) -> None:
    device = findings["device"]
    name = f"{device['name']} ({device['gfx'] or device['backend']}), {findings['dtype']}"
    lines = [f"{name}. Extension: {findings['status']}"]
    lines.append(
        f"Largest difference of any pixel: {findings['largest_difference']}/255. "
        + findings["speed"]
    )
    top = 10
    for line in lines:
        for part in textwrap.wrap(line, width // 7):
            pen.text((GAP, top), part, fill=FAINT, font=_font(13))
            top += 18
    titles = (
        f"without, {findings['median_without_s']:.2f} s",
        f"with, {findings['median_with_s']:.2f} s",
        f"difference x {AMPLIFIED}",
    )
    for column, title in enumerate(titles):
        pen.text((GAP + column * (CELL + GAP), HEAD - 28), title, fill=INK, font=_font(17))


def _visible(side: Sides) -> Any:
    gap = abs(side.without.astype("int16") - side.with_.astype("int16"))
    return (gap * AMPLIFIED).clip(0, 255).astype("uint8")


def _font(size: int) -> Any:
    """The font that comes with Pillow; before 10.1 it has one size."""
    try:
        return ImageFont.load_default(size)
    except TypeError:
        return ImageFont.load_default()
