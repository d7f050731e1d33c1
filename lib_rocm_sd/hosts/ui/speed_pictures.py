"""Pictures of a speed test, as they are put into a page: made smaller, as data URIs."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lib_rocm_sd.lab.speed_result import PICTURE, Document, Pair

MOST_SIDE = 768
"""Pixels; the full-size files lie beside the result."""
LOSSLESS_SIDE = 512
MOST_PIXELS = 8192 * 8192
MOST = 4
"""Pairs that a page shows."""


def of_shots(shots: Sequence[Pair]) -> list[Pair]:
    """The last MOST pairs of pictures in memory, for a page."""
    return [_look(each, each.off.image, each.on.image, each.difference) for each in shots[-MOST:]]


def of_files(document: Document, directory: Path | None) -> list[Pair]:
    """The same of the files beside a document. A pair whose files are damaged is left out."""
    looks = []
    for pair in document.pictures[-MOST:] if directory is not None else ():
        assert directory is not None
        names = (pair.off, pair.on, pair.difference)
        try:
            looks.append(_look(pair, *(_open(directory, name) for name in names)))
        except (OSError, ValueError, SyntaxError):
            continue
    return looks


def _look(pair: Pair, off: Any, on: Any, difference: Any) -> Pair:
    apart = difference_uri(difference)
    return replace(pair, off=picture_uri(off), on=picture_uri(on), difference=apart)


def _open(directory: Path, name: str) -> Any:
    from PIL import Image

    if not PICTURE.fullmatch(name):
        raise ValueError("not the name of a picture of ours")
    with Image.open(directory / name, formats=("PNG",)) as image:
        if image.width * image.height > MOST_PIXELS:
            raise ValueError("the picture is too large")
        return image.convert("RGB")


def picture_uri(image: Any) -> str:
    """Made smaller by averaging; large ones with JPEG's least loss, to spare the page."""
    from PIL import Image

    image = image.convert("RGB")
    image.thumbnail((MOST_SIDE, MOST_SIDE), Image.Resampling.BOX)
    if max(image.size) <= LOSSLESS_SIDE:
        return _uri(image, "png")
    return _uri(image, "jpeg", quality=95, subsampling=0)


def difference_uri(image: Any) -> str:
    """Made smaller by the largest value, so that a single pixel that differs is still seen."""
    import numpy as np
    from PIL import Image

    values = np.asarray(image.convert("RGB"))
    step = -(-max(values.shape[:2]) // MOST_SIDE)
    if step > 1:
        padded = np.pad(values, [(0, -n % step) for n in values.shape[:2]] + [(0, 0)])
        rows, columns = (n // step for n in padded.shape[:2])
        values = padded.reshape(rows, step, columns, step, 3).max((1, 3))
    return _uri(Image.fromarray(values), "png")


def _uri(image: Any, kind: str, **options: Any) -> str:
    file = io.BytesIO()
    image.info = {}
    image.save(file, format=kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
