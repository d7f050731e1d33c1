"""Which config of a kernel runs first on a GPU: the tables kernels/tuned/<gfx>/<op>.json.

A table has sections, each with where its choices come from: "modelled", by a cost model from the
machine code, or "measured", on a card, by its owner. Measured ones win, the newest first. A table
that is damaged or not ours, and an entry that no longer fits the kernel, are ignored with a reason.
Needs no torch. It lies here and not in the engine for attention's kernel.py, which needs none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lib_rocm_sd import arch

FORMAT = "rocm_sd tuned 1"
FOLDER = arch.KERNELS_DIR / "tuned"
MEASURED, MODELLED = "measured", "modelled"
MOST_BYTES = 1 << 20


class TunedError(ValueError):
    """A table that cannot be used; the message says why."""


@dataclass(frozen=True)
class Entry:
    """One choice. `form`: what it is for, such as dtype and head_dim; `config`: fields by name;
    `facts`: what it rests on.
    """

    form: Mapping[str, Any]
    config: Mapping[str, Any]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Section:
    """Choices of one origin. `defines`: the names of the kernel's definitions that they knew."""

    source: str
    about: Mapping[str, Any]
    defines: tuple[str, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Table:
    """One file's sections, what wins first; `reason`: why it is ignored, if it is."""

    sections: tuple[Section, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Choice:
    """`config`: None where the table has none that fits; `reasons`: why entries were ignored."""

    config: Any = None
    source: str = ""
    reasons: tuple[str, ...] = ()


def path_of(gfx: str, op: str) -> Path:
    """Where a GPU's table for an op lies."""
    return FOLDER / gfx / f"{op}.json"


def choice(
    gfx: str, op: str, form: Mapping[str, Any], configs: Iterable[Any], defines: Sequence[str]
) -> Choice:
    """What the table chooses for `form` among `configs`, dataclasses of one search space.

    `defines`: the names of the kernel's definitions; a section that knew others is ignored.
    """
    table = _read(path_of(gfx, op), gfx, op)
    known = {_frozen(asdict(config)): config for config in configs}
    reasons = [table.reason] if table.reason else []
    for section in table.sections:
        for entry in section.entries:
            if entry.form != form:
                continue
            config = known.get(_frozen(entry.config))
            if config is not None and set(section.defines) == set(defines):
                return Choice(config, section.source, tuple(reasons))
            named = ", ".join(str(value) for value in form.values())
            stale = "has definitions" if config is not None else "is of a search space"
            reasons.append(
                f"the {section.source} choice for {named} in kernels/tuned/{gfx}/{op}.json is"
                f" ignored: it {stale} that the kernel no longer has"
            )
    return Choice(reasons=tuple(reasons))


def parsed(data: bytes, gfx: str, op: str) -> tuple[Section, ...]:
    """The sections of a table's contents, what wins first. Raises TunedError."""
    if len(data) > MOST_BYTES:
        raise TunedError(f"it has {len(data)} bytes")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TunedError(f"it is damaged: {str(error)[:100]}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise TunedError(f"it is not of the format {FORMAT!r}")
    if (content.get("gfx"), content.get("op")) != (gfx, op):
        raise TunedError(f"it is for {content.get('op')!a:.40} on {content.get('gfx')!a:.40}")
    rows = content.get("sections")
    if not isinstance(rows, list):
        raise TunedError("it has no list of sections")
    found = [_section(row) for row in rows]
    measured = [section for section in found if section.source == MEASURED]
    measured.sort(key=lambda section: str(section.about.get("date", "")), reverse=True)
    return (*measured, *(section for section in found if section.source != MEASURED))


def _section(row: Any) -> Section:
    if not isinstance(row, dict) or row.get("source") not in (MEASURED, MODELLED):
        raise TunedError("a section says neither that it is measured nor modelled")
    entries, defines = row.get("entries"), row.get("defines")
    if not isinstance(entries, list) or not isinstance(defines, list):
        raise TunedError(f"the {row['source']} section lacks its entries or defines")
    about = {name: row[name] for name in row if name not in ("source", "entries", "defines")}
    return Section(row["source"], about, tuple(map(str, defines)), tuple(map(_entry, entries)))


def _entry(row: Any) -> Entry:
    if not isinstance(row, dict):
        raise TunedError("an entry is not an object")
    form, config = row.get("form"), row.get("config")
    if not isinstance(form, dict) or not isinstance(config, dict):
        raise TunedError("an entry lacks its form or config")
    if not all(isinstance(value, (int, str)) for value in (*form.values(), *config.values())):
        raise TunedError("an entry's form or config has a value that is neither number nor word")
    return Entry(form, config, {name: row[name] for name in row if name not in ("form", "config")})


def _frozen(fields: Mapping[str, Any]) -> frozenset[tuple[str, Any]]:
    return frozenset(fields.items())


def _read(path: Path, gfx: str, op: str) -> Table:
    """A table that does not exist is empty, without a reason."""
    try:
        status = path.stat()
    except OSError:
        return Table()
    return _read_as_of(path, gfx, op, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=64)
def _read_as_of(path: Path, gfx: str, op: str, *stamp: int) -> Table:
    try:
        with path.open("rb") as file:
            return Table(parsed(file.read(MOST_BYTES + 1), gfx, op))
    except TunedError as error:
        why = str(error)
    except OSError as error:
        why = f"it cannot be read: {error.strerror or error}"
    return Table(reason=f"kernels/tuned/{gfx}/{op}.json is ignored: {why}")
