"""Captions from files, and how well pictures fit them by a CLIP that is there."""

from __future__ import annotations

import codecs
import csv
import io
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
        try:
            captions = [" ".join(cell.split()) for cell in _cells(path)]
        except csv.Error as error:
            raise ValueError(f"{path.name} is no table: {error}") from error
    else:
        captions = [line.strip() for line in _text(path).splitlines()]
    captions = [caption for caption in captions if caption]
    if not captions:
        raise ValueError(f"{path.name} has no caption")
    return captions


def _cells(path: Path) -> list[str]:
    """The column "caption". A quote is a character in a .tsv, unless the cell begins and ends with
    it; in a .csv a quoted cell may have several lines.
    """
    file = io.StringIO(_text(path), newline="")
    is_tsv = path.suffix.lower() == ".tsv"
    if is_tsv:
        table = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        table = csv.DictReader(file)
    if COLUMN not in (table.fieldnames or ()):
        raise ValueError(f"{path.name} has no column {COLUMN!r}")
    cells = [row[COLUMN] or "" for row in table]
    if not is_tsv:
        return cells
    return [
        cell[1:-1].replace('""', '"') if len(cell) > 1 and cell[0] == cell[-1] == '"' else cell
        for cell in cells
    ]


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

    def __init__(self, folder: Path) -> None:
        from transformers import CLIPModel, CLIPProcessor

        options: dict[str, Any] = {"local_files_only": True}
        try:
            self._model: Any = CLIPModel.from_pretrained(str(folder), **options)
            self._processor: Any = CLIPProcessor.from_pretrained(str(folder), **options)
        except (OSError, ValueError, KeyError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"{folder.name} is no CLIP of transformers: {reason}") from error
        self._model.eval()

    @torch.no_grad()
    def scores(
        self, images: Sequence[Any], captions: Sequence[str], device: torch.device
    ) -> list[float]:
        """100 times the cosine of each image and its caption, at least 0: the CLIP score of Hessel
        and others (2021), as MLPerf counts it.
        """
        self._model.to(device)
        options = {"return_tensors": "pt", "padding": True, "truncation": True}
        inputs = self._processor(text=list(captions), images=list(images), **options).to(device)
        made = self._model(**inputs)
        cosines = (made.image_embeds * made.text_embeds).sum(-1)
        return [max(100 * float(cosine), 0.0) for cosine in cosines]
