"""Captions from files, and how well pictures fit them by a CLIP that is there."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

MOST_BYTES = 64 << 20
BOMS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
COLUMN = "caption"
"""The column that is read of a table, as MLPerf's captions_source.tsv has it."""


def read(path: Path) -> list[str]:
    """Captions of a text file, one a line, of a table with a column "caption", or of all .txt files
    of a folder, one each. Raises OSError, or ValueError with a reason.
    """
    if path.is_dir():
        captions = [" ".join(_text(each).split()) for each in sorted(path.glob("*.txt"))]
    elif path.suffix.lower() in (".tsv", ".csv"):
        marks = "\t" if path.suffix.lower() == ".tsv" else ","
        table = csv.DictReader(_text(path).splitlines(), delimiter=marks)
        if COLUMN not in (table.fieldnames or ()):
            raise ValueError(f"{path.name} has no column {COLUMN!r}")
        captions = [(row[COLUMN] or "").strip() for row in table]
    else:
        captions = [line.strip() for line in _text(path).splitlines()]
    captions = [caption for caption in captions if caption]
    if not captions:
        raise ValueError(f"{path.name} has no caption")
    return captions


def _text(path: Path) -> str:
    data = path.read_bytes()
    if len(data) > MOST_BYTES:
        raise ValueError(f"{path.name} is larger than {MOST_BYTES >> 20} MiB")
    encoding = next((name for bom, name in BOMS.items() if data.startswith(bom)), "utf-8")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        where = data[: error.start].count(b"\n") + 1
        raise ValueError(f"{path.name}, line {where}: not text in UTF-8 or UTF-16") from None


class Clip:
    """A CLIP of transformers in a folder. Raises ValueError where there is none."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        from transformers import CLIPModel, CLIPProcessor

        options: dict[str, Any] = {"local_files_only": True}
        try:
            self._model: Any = CLIPModel.from_pretrained(str(folder), **options)
            self._processor: Any = CLIPProcessor.from_pretrained(str(folder), **options)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{folder.name} is no CLIP of transformers: {reason}") from error
        self._model.to(device).eval()

    @torch.no_grad()
    def scores(self, images: Sequence[Any], captions: Sequence[str]) -> list[float]:
        """100 times the cosine of each image and its caption, at least 0: the CLIP score of Hessel
        and others (2021), as MLPerf counts it.
        """
        device = self._model.device
        options = {"return_tensors": "pt", "padding": True, "truncation": True}
        inputs = self._processor(text=list(captions), images=list(images), **options).to(device)
        made = self._model(**inputs)
        cosines = (made.image_embeds * made.text_embeds).sum(-1)
        return [max(100 * float(cosine), 0.0) for cosine in cosines]
