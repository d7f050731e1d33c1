"""The speed test as asked for, and its result: a JSON document, and earlier ones. No torch."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lib_rocm_sd.lab.rows import Columns, Row, write_whole

WHAT = ("attention", "vae", "step", "upscaler", "image")
PRESETS = ("quick", "standard", "custom")
LEAST_SIZE, MOST_SIZE, STEP = 64, 8192, 8
MOST_SIZES = 8
SHOWN = 40
"""Characters of a wrong value that a message repeats."""


@dataclass(frozen=True)
class Request:
    """`what`: parts of WHAT. `sizes`: a side of the picture in pixels each, with "custom" only."""

    what: tuple[str, ...] = WHAT
    preset: str = "quick"
    sizes: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; `parse` takes it back."""
        return {"what": list(self.what), "preset": self.preset, "sizes": list(self.sizes)}


def parse(mapping: object) -> Request:
    """The request that JSON or a form's fields describe; what is left out has its default.

    Raises ValueError, in words for people, for anything else.
    """
    if not isinstance(mapping, Mapping):
        raise ValueError("a speed test is asked for with an object")  # noqa: TRY004
    unknown = [key for key in mapping if key not in ("what", "preset", "sizes")]
    if unknown:
        raise ValueError(f"unknown: {shown(unknown[0])}; known are what, preset and sizes")
    preset = mapping.get("preset", "quick")
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ValueError(f"preset is {shown(preset)}: it has to be one of {', '.join(PRESETS)}")
    what = _what(mapping.get("what", WHAT))
    sizes = _sizes(mapping.get("sizes", ()))
    if preset == "custom" and not sizes:
        raise ValueError("with the preset custom, sizes has to name at least one")
    if preset != "custom" and sizes:
        raise ValueError("sizes is for the preset custom only")
    return Request(what, preset, sizes)


def _what(value: object) -> tuple[str, ...]:
    parts = _asked_list(value, "what")
    for part in parts:
        if not isinstance(part, str) or part not in WHAT:
            raise ValueError(f"what has {shown(part)}: it is made of {', '.join(WHAT)}")
    if not parts:
        raise ValueError(f"what is empty: choose at least one of {', '.join(WHAT)}")
    return tuple(part for part in WHAT if part in parts)


def _sizes(value: object) -> tuple[int, ...]:
    sizes = _asked_list(value, "sizes")
    if len(sizes) > MOST_SIZES:
        raise ValueError(f"{len(sizes)} sizes are too many: at most {MOST_SIZES}")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int):
            text = f"a size is {shown(size)}: it has to be a whole number of pixels"
            raise ValueError(text)  # noqa: TRY004
        if not LEAST_SIZE <= size <= MOST_SIZE:
            limits = f"{LEAST_SIZE} to {MOST_SIZE}"
            raise ValueError(f"a size is {shown(size)}: it has to be from {limits} pixels")
        if size % STEP:
            raise ValueError(f"a size is {size}: it has to be a multiple of {STEP}")
    return tuple(sorted(set(sizes)))


def _asked_list(value: object, name: str) -> list[Any]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise ValueError(f"{name} is {shown(value)}: it has to be a list")  # noqa: TRY004
    return list(value)


def shown(value: object) -> str:
    """A value from outside as a message may repeat it: short, on one line."""
    if isinstance(value, int) and abs(value) >= 10**SHOWN:
        return "a number with very many digits"
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


FORMAT = "rocm_sd speed test 1"
UNITS = ("ms", "it/s", "s")
FILES = "rocm_sd-speedtest-*.json"
MOST_BYTES = 1 << 20
"""A file larger than this is not one of ours."""
MOST_ROWS, MOST_NOTES, MOST_FACTS, MOST_TEXT, MOST_DIGITS = 2000, 100, 50, 500, 18
ID = re.compile(r"[0-9a-f]{12}")
DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
COLUMNS = Columns(
    "test case method=way unit median p10 p90 runs peak_mib error energy_j power_w slowed "
    "reason note",
    letters=MOST_TEXT,
)
"""Fields of a row of the document."""
PICTURE = re.compile(r"[\w.-]{1,120}\.png", re.ASCII)


@dataclass(frozen=True)
class Pair:
    """A picture with the extension off and on, and how far they are apart: of 255, the largest
    value and the mean. `off`, `on`: in a session Pictures of speed_job, in a document the names of
    files beside it, empty where there are none, in a page what an <img> may have as src; likewise
    `difference`, amplified, in a session an image.
    """

    case: str
    off: Any = ""
    on: Any = ""
    difference: Any = ""
    largest: int = 0
    mean: float = 0.0


@dataclass
class Document:
    """A speed test. `date` is in UTC. `notes`: what else is to be known."""

    machine: dict[str, Any]
    request: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    pictures: list[Pair] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(6))
    date: str = field(
        default_factory=lambda: datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    )

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "format": FORMAT,
            "id": self.id,
            "date": self.date,
            "machine": dict(self.machine),
            "request": dict(self.request),
            "rows": [COLUMNS.as_json(row) for row in self.rows],
            "pictures": [asdict(pair) for pair in self.pictures],
            "notes": list(self.notes),
            "complete": self.complete,
        }

    @property
    def stem(self) -> str:
        """What the names of its files begin with."""
        return f"rocm_sd-speedtest-{re.sub('[^0-9TZ]', '', self.date)}-{self.id}"

    def write(self, directory: Path) -> Path:
        """Write the whole document at once. OSError where that cannot be."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.stem}.json"
        text = json.dumps(self.as_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        write_whole(path, text + "\n")
        return path


@dataclass(frozen=True)
class History:
    """Documents, the oldest first, and why files were left out, by their names."""

    documents: tuple[Document, ...]
    skipped: Mapping[str, str]


SAME = ("card", "gfx", "backend", "os")
"""Facts that machines share whose figures may be put beside each other as older and newer."""


def history(directory: Path | None, machine: Mapping[str, Any]) -> History:
    """All documents in `directory` of this machine: the same card, system and kind of torch."""
    documents, skipped = [], {}
    for path in files(directory, FILES):
        try:
            document = read(path)
        except (OSError, ValueError) as error:
            skipped[path.name] = reason_of(error)
            continue
        same = all(document.machine.get(key) == machine.get(key) for key in SAME)
        if same:
            documents.append(document)
        else:
            skipped[path.name] = "of another machine"
    return History(tuple(sorted(documents, key=lambda document: document.date)), skipped)


def files(directory: Path | None, pattern: str) -> list[Path]:
    """The plain files in a folder that match; none where there is no folder."""
    if directory is None:
        return []
    try:
        return sorted(path for path in directory.glob(pattern) if path.is_file())
    except OSError:
        return []


def reason_of(error: BaseException) -> str:
    """Why a file was not taken, without its path."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error)


def read(path: Path) -> Document:
    """The document in a file. OSError, or ValueError with a reason where it is none of ours."""
    return parse_document(contents(path))


def contents(path: Path) -> bytes:
    """What a file holds. OSError, or ValueError where that is more than any result of ours."""
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"larger than {MOST_BYTES >> 20} MiB")
    return data


def loaded(data: bytes) -> Any:
    """What a file's bytes are as JSON. ValueError with a reason."""
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse, parse_int=_integer)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("not text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at line {error.lineno}") from None


def parse_document(data: bytes) -> Document:
    """The document of a file's bytes, trusting nothing. ValueError with a reason."""
    content = loaded(data)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"no result of this speed test: format is not {FORMAT!r}")
    return _document(content)


def of(content: dict[str, Any]) -> Document:
    """The document that `Document.as_dict` gave."""
    return parse_document(json.dumps(content).encode())


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError("a number has too many digits")
    return int(digits)


def _document(content: dict[str, Any]) -> Document:
    ident, date = (_text(content, key) for key in ("id", "date"))
    if not ID.fullmatch(ident):
        raise ValueError("id is not one of ours")
    if not DATE.fullmatch(date):
        raise ValueError("date is not like 2026-01-31T12:00:00Z")
    complete = content.get("complete")
    if not isinstance(complete, bool):
        raise ValueError("complete is neither true nor false")  # noqa: TRY004
    request = checked(content.get("request"), "request", dict)
    sizes = [int(_number(size, "a size", 1e9)) for size in _items(request, "sizes", 100)]
    what = [checked(part, "a part") for part in _items(request, "what", 100)]
    return Document(
        machine=facts_of(checked(content.get("machine"), "machine", dict)),
        request={"what": what, "preset": _text(request, "preset"), "sizes": sizes},
        rows=[_row(checked(each, "a row", dict)) for each in _items(content, "rows", MOST_ROWS)],
        pictures=[
            _pair(checked(each, "a pair of pictures", dict))
            for each in _items(content, "pictures", MOST_ROWS)
        ],
        notes=[checked(note, "a note") for note in _items(content, "notes", MOST_NOTES)],
        complete=complete,
        id=ident,
        date=date,
    )


def facts_of(facts: dict[str, Any], owner: str = "machine") -> dict[str, Any]:
    """Short texts, numbers, truth values and nulls. Raises ValueError for anything else."""
    if len(facts) > MOST_FACTS:
        raise ValueError(f"{owner} has {len(facts)} facts: at most {MOST_FACTS}")
    for name, value in facts.items():
        checked(name, f"a name in {owner}")
        if value is not None and not isinstance(value, (bool, int, float)):
            checked(value, f"{owner}'s {name}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{owner}'s {name} is no number")
    return facts


def _row(item: dict[str, Any]) -> Row:
    texts: dict[str, Any] = {key: _text(item, key) for key in ("test", "case", "unit")}
    texts["way"] = _text(item, "method")
    texts |= {key: _text(item, key) for key in ("slowed", "reason", "note") if key in item}
    if texts["test"] not in WHAT or texts["unit"] not in UNITS:
        raise ValueError("a row's test or unit is not known")
    figures: dict[str, Any] = {}
    for key in ("median", "p10", "p90", "peak_mib", "error", "energy_j", "power_w"):
        value = item.get(key)
        figures[key] = math.nan if value is None else _number(value, key, 1e12)
    row = Row(**texts, **figures, runs=int(_number(item.get("runs", 0), "runs", 1e9)))
    if not row.reason and not row.median > 0:
        raise ValueError("a row has neither a figure above 0 nor a reason")
    if row.p10 > row.median or row.p90 < row.median:
        raise ValueError("a row's median is not between its p10 and p90")
    return row


def _pair(item: dict[str, Any]) -> Pair:
    names = {key: _text(item, key) for key in ("off", "on", "difference")}
    for name in names.values():
        if name and not PICTURE.fullmatch(name):
            raise ValueError("a picture is not the name of a PNG beside the document")
    largest, mean = (_number(item.get(key), key, 255) for key in ("largest", "mean"))
    return Pair(_text(item, "case"), **names, largest=int(largest), mean=mean)


def _items(content: Mapping[str, Any], key: str, most: int) -> list[Any]:
    items: list[Any] = checked(content.get(key, []), key, list)
    if len(items) > most:
        raise ValueError(f"{len(items)} {key}: at most {most}")
    return items


def _number(value: object, name: str, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is not a number")  # noqa: TRY004
    if not 0 <= value <= most:
        raise ValueError(f"{name} is not from 0 to {most:g}")
    return float(value)


def _text(item: Mapping[str, Any], key: str) -> str:
    return str(checked(item.get(key), key))


def checked(value: Any, name: str, kind: type = str) -> Any:
    """The value, if it is of its kind, and a text not too long."""
    if not isinstance(value, kind):
        words: dict[Any, str] = {str: "a text", list: "a list", dict: "an object"}
        raise ValueError(f"{name[:MOST_TEXT]} is not {words[kind]}")  # noqa: TRY004
    if isinstance(value, str) and len(value) > MOST_TEXT:
        raise ValueError(f"{name[:MOST_TEXT]} is longer than {MOST_TEXT} characters")
    return value


OURS = {**dict.fromkeys(WHAT, "rocm_sd"), "image": "extension on"}
"""Our method's name in each test."""


def ours(rows: Sequence[Row], test: str) -> list[Row]:
    """The measured rows of our method in one test."""
    return [row for row in rows if row.test == test and row.way == OURS[test] and not row.reason]
