"""A speed test's result, or a text, as ComfyUI's IMAGE: a plot of bars drawn by Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lib_rocm_sd.lab.rows import Row
from lib_rocm_sd.lab.speed_result import OURS, WHAT, Document
from lib_rocm_sd.lab.speed_text import machine_line, printable
from lib_rocm_sd.lab.svg import COLOURS, number

WIDTH, LINE, PAD, NAME, BAR = 1024, 22, 16, 330, 430
"""Width of the picture, line height, border, start and longest length of the bars, in pixels."""
INK, PAPER, FAINT = "#222222", "#ffffff", "#777777"
Line = tuple[str, float, str, str]
"""What stands at the left, the bar's share of the longest, its colour, what stands behind it."""


def of_document(document: Document) -> torch.Tensor:
    """(1, H, W, 3), 0..1."""
    lines: list[Line] = [
        (f"ROCm SD speed test, {document.date[:10]}", 0.0, INK, ""),
        (machine_line(document.machine), 0.0, INK, ""),
    ]
    for test in WHAT:
        cases = dict.fromkeys(row.case for row in document.rows if row.test == test)
        for case in cases:
            lines += [("", 0.0, INK, ""), (f"{test}: {case}", 0.0, INK, "")]
            rows = [row for row in document.rows if (row.test, row.case) == (test, case)]
            lines += _bars(rows, OURS[test])
    lines += [(note, 0.0, FAINT, "") for note in document.notes]
    return drawn(lines)


def of_text(text: str) -> torch.Tensor:
    """The same of a few words, such as a reason."""
    return drawn([(line, 0.0, INK, "") for line in text.splitlines()])


def _bars(rows: Sequence[Row], ours: str) -> list[Line]:
    most = max([row.median for row in rows if not row.reason], default=0.0)
    lines = []
    for row in rows:
        colour = COLOURS[0] if row.way == ours else COLOURS[1]
        if row.reason or not most > 0:
            lines.append((row.way, 0.0, FAINT, row.reason))
        else:
            said = f"{number(row.median)} {row.unit}"
            lines.append((row.way, row.median / most, colour, said))
    return lines


def drawn(lines: Sequence[Line]) -> torch.Tensor:
    """One picture of them, as high as it has to be."""
    from PIL import Image, ImageDraw, ImageFont

    height = 2 * PAD + LINE * max(len(lines), 1)
    picture = Image.new("RGB", (WIDTH, height), PAPER)
    draw, font = ImageDraw.Draw(picture), _font(ImageFont)
    for place, (name, share, colour, said) in enumerate(lines):
        top = PAD + place * LINE
        plain = not said and not share
        ink = colour if plain else INK
        draw.text((PAD, top), printable(name), fill=ink, font=font)
        end = NAME + round(BAR * share)
        if share:
            draw.rectangle((NAME, top + 2, end, top + LINE - 6), fill=colour)
        draw.text((end + 8, top), printable(said), fill=INK if share else FAINT, font=font)
    data = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return data.view(1, height, WIDTH, 3).float() / 255


def _font(fonts: Any) -> Any:
    """Pillow's own: a smooth one where it has that."""
    try:
        return fonts.load_default(14)
    except TypeError:  # before 10.1
        return fonts.load_default()
