"""`python -m lib_rocm_sd tune`: which config of attention runs first on this GPU, what Performance
has measured here, as a file that an owner can contribute, and such a file into this checkout; what
a table of kernels/tuned must be to be kept there. Showing and checking need no torch.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lib_rocm_sd import arch, checks
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.checks import UsageError
from lib_rocm_sd.commands.support import arches_of, as_table, check_writable, gpu
from lib_rocm_sd.lab.rows import write_whole
from lib_rocm_sd.ops import tuned
from lib_rocm_sd.ops.attention import kernel
from lib_rocm_sd.ops.tuned import FORMAT, MEASURED, MODELLED, Entry, Section, TunedError

OP = kernel.OP
MOST_TEXT = 200
TEXTS = ("note", "rocm_sd", "kernel")
ABOUT: dict[str, dict[str, Any]] = {
    MEASURED: {
        **dict.fromkeys((*TEXTS, "card", "date", "torch"), str),
        **dict.fromkeys(("driver", "rocm", "os"), (str, type(None))),
    },
    MODELLED: dict.fromkeys((*TEXTS, "command", "compiler", "counted"), str),
}
"""What a section says of itself, all of it."""
COUNTS = ("of", "vgprs", "spills", "scratch_bytes", "lds_bytes", "waves_per_simd")
FACTS: dict[str, dict[str, Any]] = {
    MEASURED: {"times": list},
    MODELLED: {
        **dict.fromkeys(COUNTS, int),
        **dict.fromkeys(("cycles_per_1024_pairs", "bound"), (int, float)),
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
    write_whole(path, text_of(content))


def kept(gfx: str) -> list[dict[str, Any]]:
    """The sections of a GPU's table, without entries that no longer fit the kernel; none where it
    cannot be read.
    """
    try:
        data = tuned.path_of(gfx, OP).read_bytes()
        tuned.parsed(data, gfx, OP)
    except (OSError, TunedError):
        return []
    row, sections = arch.table()[gfx], []
    for section in json.loads(data)["sections"]:
        entries = [
            each
            for each in section["entries"]
            if not _unfit(Entry(each["form"], each["config"], {}), section["defines"], row)
        ]
        sections += [{**section, "entries": entries}] if entries else []
    return sections


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
    wrong = [f"it has {extra!a:.40}" for extra in content if extra not in new("", [])]
    wrong += [] if sections else ["it has no sections"]
    for section in sections:
        wrong += [f"{section.source}: {each}" for each in _of_section(section, row)]
    return wrong


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
        unfit = _unfit(entry, section.defines, row)
        if unfit:
            yield f"{name}: {unfit}"
        for each in _of_facts(entry.facts, section.source, row):
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


def _unfit(entry: Entry, defines: Sequence[str], row: Arch) -> str:
    """Why form and config are not the kernel's; empty if they are."""
    if entry.form.keys() != kernel.form("", 0).keys() or entry.form["mask"] != "none":
        return "no form of attention that is chosen for"
    dtype, head_dim = entry.form["dtype"], entry.form["head_dim"]
    if dtype not in kernel.DTYPES or head_dim not in kernel.SHIPPED_HEAD_DIMS:
        return "no kernel is shipped for it"
    space = kernel.configs(row, head_dim)
    names = {name for name, _ in kernel.spec(dtype, head_dim, "none", space[0]).defines}
    if not any(entry.config == kernel.fields_of(config) for config in space) or names != set(
        defines
    ):
        return "its config or definitions are not the kernel's any more"
    return ""


def _of_facts(facts: Mapping[str, Any], source: str, row: Arch) -> Iterator[str]:
    wrong = list(_of_fields(facts, FACTS[source]))
    if wrong:
        yield from wrong
    elif source == MEASURED:
        yield from _of_times(facts["times"])
    else:
        if facts["spills"] or facts["scratch_bytes"]:
            yield "it spills registers"
        fits = 0 < facts["vgprs"] <= row.max_vgprs and facts["lds_bytes"] <= row.lds_bytes
        if not fits or facts["waves_per_simd"] < 1:
            yield "it does not fit this GPU"
        if not (_positive(facts["cycles_per_1024_pairs"]) and 0 <= facts["bound"] <= 1):
            yield "impossible cycles or bound"


def _of_times(rows: list[Any]) -> Iterator[str]:
    """Each has a problem, and medians in us of the choice and of the safe default, which is None
    where that does not work.
    """
    if not rows:
        yield "no times"
    keys = {"problem", "time_us", "default_us"}
    for row in rows:
        if not isinstance(row, dict) or row.keys() != keys or not isinstance(row["problem"], str):
            yield "a time is not of a problem"
        elif not re.fullmatch(r"[\w ]{1,80}", row["problem"]):
            yield "a problem is no plain text"
        elif not _positive(row["time_us"]) or not (
            row["default_us"] is None or _positive(row["default_us"])
        ):
            yield "a time is impossible"


def _positive(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add = parser.add_argument
    add("--arch", help="show the tables of these GPUs: 'all', or gfx ids")
    add("--gpu", type=int, metavar="N", help="which GPU of this machine")
    add("--measure", action="store_true", help="measure on this GPU what was not measured yet")
    what = "write what was measured here, to contribute"
    add("--export", type=Path, metavar="FILE", help=what)
    what = "check a contributed file and put it into kernels/tuned"
    add("--import", type=Path, metavar="FILE", dest="imported", help=what)


def main(args: argparse.Namespace) -> int:
    """0: done; 1: incomplete, or the file is refused; 2: no GPU that is served, or bad usage."""
    try:
        if args.imported is not None:
            return take_in(args.imported)
        if args.measure or args.export is not None:
            return on_this_card(args)
        return show(arches_of("all" if args.arch is None else args.arch))
    except BrokenPipeError:
        raise
    except OSError as error:
        file = error.filename or args.imported or args.export or "a file"
        raise UsageError(checks.told(file, error)) from error
    except KeyboardInterrupt:
        _err("interrupted; what was measured is kept, and is not measured again")
        return 2


def _err(line: str) -> None:
    print(f"tune: {line}", file=sys.stderr, flush=True)


def show(arches: Sequence[Arch]) -> int:
    """A line for each GPU, dtype and head_dim: what Auto runs, and by whom it was chosen."""
    rows: list[list[object]] = [["GPU", "dtype", "head_dim", "queries", "keys", "chosen"]]
    reasons: dict[str, None] = {}
    for row in arches:
        for dtype in kernel.DTYPES:
            for head_dim in kernel.SHIPPED_HEAD_DIMS:
                config = kernel.ordered(row, dtype, head_dim)[0]
                choice = kernel.choice(row, dtype, head_dim)
                size = [config.block_q, config.block_k]
                rows.append([row.gfx, dtype, head_dim, *size, choice.source or "default"])
                reasons.update(dict.fromkeys(choice.reasons))
    print(as_table(rows), flush=True)
    for reason in reasons:
        _err(reason)
    return int(bool(reasons))


def on_this_card(args: argparse.Namespace) -> int:
    """Measure what is missing, and write what is known. 1 where something is missing still."""
    from lib_rocm_sd.commands import tune_measured

    check_writable(args, "export")
    try:
        card = gpu(args.gpu)
    except UsageError as error:
        raise UsageError(f"nothing can be measured here: {error}") from error
    if args.measure:
        tune_measured.measure_missing(card)
    rows = {slot: tune_measured.entry_of(card, slot) for slot in tune_measured.SLOTS}
    entries = [entry for entry in rows.values() if entry is not None]
    for slot, entry in rows.items():
        if entry is None:
            print(f"not measured: {slot}")
    gfx, path = card.arch.gfx, args.export
    if path is not None and entries:
        content = new(gfx, [tune_measured.section_of(card, entries)])
        wrong = problems(text_of(content).encode())
        if wrong:
            raise UsageError(f"{path.name} is not written: {'; '.join(wrong)}")
        write(path, content)
        print(f"{path.name}: {len(entries)} choices for {card.info.name} ({gfx}). It has no")
        print("names of users, hosts or folders; CONTRIBUTING.md says where to send it.")
    if len(entries) < len(rows):
        print("With --measure what is missing is measured.")
    return int(len(entries) < len(rows))


def take_in(path: Path) -> int:
    """Check a file and merge it into this checkout's table of its GPU."""
    if path.is_symlink() or path.is_dir() or path.stat().st_size > tuned.MOST_BYTES:
        _err(f"{path} is refused: a link, a folder or too long a file")
        return 1
    data = path.read_bytes()
    wrong = problems(data)
    if wrong:
        for reason in wrong:
            _err(f"{path.name} is refused: {ascii(reason)[1:-1]}")
        return 1
    content = json.loads(data)
    gfx = content["gfx"]
    for section in content["sections"]:
        write(tuned.path_of(gfx, kernel.OP), with_section(gfx, section))
        print(f"kernels/tuned/{gfx}/{kernel.OP}.json: {len(section['entries'])} choices")
    return 0
