"""Writing the tables of kernels/tuned, and what one must be to be kept there. Needs no torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lib_rocm_sd import arch
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops import tuned
from lib_rocm_sd.ops.attention import kernel as attention_kernel
from lib_rocm_sd.ops.tuned import FORMAT, MEASURED, MODELLED, Entry, Section, TunedError

OP = attention_kernel.OP
MOST_TEXT = 200
ABOUT: dict[str, dict[str, Any]] = {
    MEASURED: {
        "note": str,
        "card": str,
        "date": str,
        "rocm_sd": str,
        "kernel": str,
        "torch": str,
        "driver": (str, type(None)),
        "rocm": (str, type(None)),
        "os": (str, type(None)),
    },
    MODELLED: {
        "note": str,
        "command": str,
        "compiler": str,
        "counted": str,
        "rocm_sd": str,
        "kernel": str,
    },
}
"""What a section says of itself, all of it."""
FACTS: dict[str, dict[str, Any]] = {
    MEASURED: {"times": list},
    MODELLED: {
        "of": int,
        "cycles_per_1024_pairs": (int, float),
        "bound": (int, float),
        "vgprs": int,
        "spills": int,
        "scratch_bytes": int,
        "lds_bytes": int,
        "waves_per_simd": int,
    },
}
"""What an entry says beside its form and config, all of it."""
FOLDERS = re.compile(r"[/\\]\w|[A-Za-z]:[/\\]|@")
"""What a folder or an address has, and no name of a card, driver or version."""


def new(gfx: str, sections: list[dict[str, Any]]) -> dict[str, Any]:
    """A table's content."""
    return {"format": FORMAT, "op": OP, "gfx": gfx, "sections": sections}


def text_of(content: Mapping[str, Any]) -> str:
    """As JSON, an entry to a line."""
    entries = [entry for section in content["sections"] for entry in section["entries"]]
    marks = {f'"entry {number}"': json.dumps(entry) for number, entry in enumerate(entries)}
    numbers = iter(range(len(entries)))
    sections = [
        {**section, "entries": [f"entry {next(numbers)}" for _ in section["entries"]]}
        for section in content["sections"]
    ]
    text = json.dumps({**content, "sections": sections}, indent=1)
    return re.sub(r'"entry \d+"', lambda mark: marks[mark[0]], text) + "\n"


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(text_of(content), encoding="utf-8")
    beside.replace(path)


def kept(gfx: str) -> list[dict[str, Any]]:
    """The sections of a GPU's table, without entries that no longer fit the kernel; none where it
    cannot be read.
    """
    try:
        data = tuned.path_of(gfx, OP).read_bytes()
        tuned.parsed(data, gfx, OP)
    except (OSError, TunedError):
        return []
    sections = [_fitting(section, arch.table()[gfx]) for section in json.loads(data)["sections"]]
    return [section for section in sections if section["entries"]]


def _fitting(section: dict[str, Any], row: Arch) -> dict[str, Any]:
    entries = [
        entry
        for entry in section["entries"]
        if not list(_of_entry(Entry(entry["form"], entry["config"], {}), section["defines"], row))
    ]
    return {**section, "entries": entries}


def with_section(gfx: str, section: dict[str, Any]) -> dict[str, Any]:
    """A GPU's table with a section in place of that of the same card, or of the model."""
    same = ("source", "card")
    others = [
        other for other in kept(gfx) if any(other.get(name) != section.get(name) for name in same)
    ]
    return new(gfx, sorted([*others, section], key=lambda each: str(each["source"])))


def problems(data: bytes, gfx: str | None = None) -> list[str]:
    """Why contents may not be kept in kernels/tuned; empty when they may. `gfx`: the folder's."""
    try:
        content = json.loads(data)
        named = content.get("gfx") if isinstance(content, dict) else None
        sections = tuned.parsed(data, gfx or str(named), OP)
    except (ValueError, RecursionError) as error:
        return [str(error)]
    row = arch.table().get(str(named))
    if row is None:
        return [f"{named!a:.40} is no row of kernels/arch.json"]
    found = [f"it has {extra!a:.40}" for extra in content if extra not in new("", [])]
    found += [] if sections else ["it has no sections"]
    for section in sections:
        found += [f"{section.source}: {each}" for each in _of_section(section, row)]
    return found


def _of_section(section: Section, row: Arch) -> Iterator[str]:
    yield from _of_fields(section.about, ABOUT[section.source])
    if not section.entries:
        yield "no entries"
    seen = []
    for entry in section.entries:
        name = ", ".join(str(value) for value in entry.form.values())[:60]
        if entry.form in seen:
            yield f"{name} twice"
        seen.append(entry.form)
        for each in (
            *_of_entry(entry, section.defines, row),
            *_of_facts(entry, section.source, row),
        ):
            yield f"{name}: {each}"


def _of_fields(fields: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    for name in wanted.keys() - fields.keys():
        yield f"{name} is missing"
    for name, value in fields.items():
        if name not in wanted:
            yield f"{name!a:.40} is not known here"
        elif not isinstance(value, wanted[name]) or isinstance(value, bool):
            yield f"{name} is {value!a:.40}"
        elif isinstance(value, str):
            if len(value) > MOST_TEXT or not value.isprintable() or not value:
                yield f"{name} is empty, too long or not plain text"
            elif FOLDERS.search(value):
                yield f"{name} looks like a folder or an address: {value!a:.60}"


def _of_entry(entry: Entry, defines: Sequence[str], row: Arch) -> Iterator[str]:
    """What is wrong with form and config."""
    form = attention_kernel.form("", 0)
    if entry.form.keys() != form.keys() or entry.form["mask"] != "none":
        yield "no form of attention that is chosen for"
        return
    dtype, head_dim = entry.form["dtype"], entry.form["head_dim"]
    known = attention_kernel.SHIPPED_HEAD_DIMS
    if dtype not in attention_kernel.DTYPES or head_dim not in known:
        yield "no kernel is shipped for it"
    elif _stale(entry, defines, row):
        yield "its config or definitions are not the kernel's any more"


def _stale(entry: Entry, defines: Sequence[str], row: Arch) -> bool:
    """Whether an entry of a form that is shipped no longer fits the kernel."""
    dtype, head_dim = entry.form["dtype"], entry.form["head_dim"]
    space = attention_kernel.configs(row, head_dim)
    known = attention_kernel.spec(dtype, head_dim, "none", space[0]).defines
    fits = any(entry.config == attention_kernel.fields_of(config) for config in space)
    return not fits or {name for name, _ in known} != set(defines)


def _of_facts(entry: Entry, source: str, row: Arch) -> Iterator[str]:
    wrong = list(_of_fields(entry.facts, FACTS[source]))
    yield from wrong
    if wrong:
        return
    facts = entry.facts
    if source == MEASURED:
        yield from _of_times(facts["times"])
        return
    if facts["spills"] or facts["scratch_bytes"]:
        yield "it spills registers"
    fits = 0 < facts["vgprs"] <= row.max_vgprs and facts["lds_bytes"] <= row.lds_bytes
    if not fits or facts["waves_per_simd"] < 1:
        yield "it does not fit this GPU"
    if not (_positive(facts["cycles_per_1024_pairs"]) and 0 <= facts["bound"] <= 1):
        yield "impossible cycles or bound"


def _of_times(rows: list[Any]) -> Iterator[str]:
    """A time is of a problem: the choice's and the safe default's median in us, the latter None
    where it does not work.
    """
    keys = {"problem", "time_us", "default_us"}
    if not rows:
        yield "no times"
    for row in rows:
        if not isinstance(row, dict) or row.keys() != keys or not isinstance(row["problem"], str):
            yield "a time is not of a problem"
        elif not re.fullmatch(r"[\w ]{1,80}", row["problem"]):
            yield "a problem is no plain text"
        elif not all(_positive(each) for each in _known(row)):
            yield "a time is impossible"


def _known(row: dict[str, Any]) -> Iterator[Any]:
    yield row["time_us"]
    if row["default_us"] is not None:
        yield row["default_us"]


def _positive(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0
