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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib_rocm_sd import arch, checks
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.commands import support as cli_support
from lib_rocm_sd.commands.support import anonymous
from lib_rocm_sd.lab.rows import write_whole
from lib_rocm_sd.ops import tuned
from lib_rocm_sd.ops.attention import kernel
from lib_rocm_sd.ops.tuned import FORMAT, MEASURED, MODELLED, Entry, Section, TunedError

if TYPE_CHECKING:
    from lib_rocm_sd.commands.tune_measured import Each, Gpu, Slot
    from lib_rocm_sd.ops.attention.problem import AttentionProblem

OP = kernel.OP
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
    form = kernel.form("", 0)
    if entry.form.keys() != form.keys() or entry.form["mask"] != "none":
        yield "no form of attention that is chosen for"
        return
    dtype, head_dim = entry.form["dtype"], entry.form["head_dim"]
    known = kernel.SHIPPED_HEAD_DIMS
    if dtype not in kernel.DTYPES or head_dim not in known:
        yield "no kernel is shipped for it"
    elif _stale(entry, defines, row):
        yield "its config or definitions are not the kernel's any more"


def _stale(entry: Entry, defines: Sequence[str], row: Arch) -> bool:
    """Whether an entry of a form that is shipped no longer fits the kernel."""
    dtype, head_dim = entry.form["dtype"], entry.form["head_dim"]
    space = kernel.configs(row, head_dim)
    known = kernel.spec(dtype, head_dim, "none", space[0]).defines
    fits = any(entry.config == kernel.fields_of(config) for config in space)
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


DONE, FAILED, UNUSABLE = 0, 1, 2
"""Exit codes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--arch", help="show the tables of these GPUs: 'all', or gfx ids")
    parser.add_argument("--gpu", type=int, metavar="N", help="which GPU of this machine")
    parser.add_argument(
        "--measure", action="store_true", help="measure on this GPU what was not measured yet"
    )
    parser.add_argument(
        "--export", type=Path, metavar="FILE", help="write what was measured here, to contribute"
    )
    parser.add_argument(
        "--import",
        type=Path,
        metavar="FILE",
        dest="imported",
        help="check a contributed file and put it into kernels/tuned",
    )


def main(args: argparse.Namespace) -> int:
    """0: done; 1: incomplete, or the file is refused; 2: no GPU that is served, or bad usage."""
    try:
        if args.imported is not None:
            return take_in(args.imported)
        if args.measure or args.export is not None:
            return on_this_card(args.gpu, args.measure, args.export)
        return show(cli_support.arches_of("all" if args.arch is None else args.arch))
    except cli_support.UsageError as error:
        _err(str(error))
    except BrokenPipeError:
        raise
    except OSError as error:
        _err(checks.told(error.filename or args.imported or args.export or "a file", error))
    except KeyboardInterrupt:
        _err("interrupted; what was measured is kept, and is not measured again")
    return UNUSABLE


def _err(line: str) -> None:
    print(f"tune: {line}", file=sys.stderr, flush=True)


def _say(line: str) -> None:
    print(line, flush=True)


# -- what is chosen ------------------------------------------------------------------------------


def show(arches: Sequence[Arch]) -> int:
    """A line for each GPU, dtype and head_dim: what Auto runs, and by whom it was chosen."""
    rows: list[list[object]] = [["GPU", "dtype", "head_dim", "queries", "keys", "chosen"]]
    reasons: dict[str, None] = {}
    for row in arches:
        for dtype in kernel.DTYPES:
            for head_dim in kernel.SHIPPED_HEAD_DIMS:
                config = kernel.ordered(row, dtype, head_dim)[0]
                found = kernel.choice(row, dtype, head_dim)
                size = [config.block_q, config.block_k]
                rows.append([row.gfx, dtype, head_dim, *size, found.source or "default"])
                reasons.update(dict.fromkeys(found.reasons))
    _say(cli_support.as_table(rows))
    for reason in reasons:
        _err(reason)
    return FAILED if reasons else DONE


# -- measured here -------------------------------------------------------------------------------


def on_this_card(index: int | None, measure: bool, path: Path | None) -> int:
    """Measure what is missing, and write what is known."""
    from lib_rocm_sd.commands import selftest, tune_measured

    why = "" if path is None else checks.unwritable(path)
    if why:
        _err(f"--export: {why}")
        return UNUSABLE
    place, info = selftest.gpu(index)
    if place is None or info is None or info.arch is None:
        _err(f"nothing can be measured here: {selftest.why_not(info)}")
        return UNUSABLE
    card = tune_measured.Gpu(place, info, info.arch)
    if measure and not _measured(card):
        return UNUSABLE
    entries, lacking = _entries(card)
    for slot in lacking:
        _say(f"not measured: {slot}")
    if path is not None and entries:
        section = tune_measured.section_of(card, entries)
        content = new(card.arch.gfx, [section])
        wrong = problems(text_of(content).encode())
        if wrong:
            _err(f"{path.name} is not written: {'; '.join(wrong)}")
            return UNUSABLE
        write(path, content)
        _say(f"{path.name}: {len(entries)} choices for {info.name} ({card.arch.gfx}). It has no")
        _say("names of users, hosts or folders; CONTRIBUTING.md says where to send it.")
    if lacking:
        _say("With --measure what is missing is measured.")
    return FAILED if lacking else DONE


def _entries(card: Gpu) -> tuple[list[dict[str, Any]], list[Slot]]:
    """The lines of a table, and the slots for which there is none."""
    from lib_rocm_sd.commands import tune_measured

    entries, lacking = [], []
    for slot in tune_measured.SLOTS:
        entry = tune_measured.entry_of(card, slot, tune_measured.stored(card, slot))
        if entry is None:
            lacking.append(slot)
        else:
            entries.append(entry)
    return entries, lacking


def _measured(card: Gpu) -> bool:
    """Measure what is missing, a line for each problem; False where nothing can be launched."""
    from lib_rocm_sd.commands import tune_measured
    from lib_rocm_sd.engine import planner, selftest

    work = [each for slot in tune_measured.SLOTS for each in tune_measured.missing(card, slot)]
    if not work:
        _say("All is measured already.")
        return True
    _say(f"{card.info.name} ({card.arch.gfx}): {len(work)} problems; this takes some minutes.")
    try:
        launch = planner.default_launcher(card.place, card.arch)
    except (RuntimeError, OSError) as error:
        _err(f"the driver cannot be used: {anonymous(selftest.describe(error))}")
        return False
    tune_measured.compile_all(card, work, _say)
    for number, problem in enumerate(work, 1):
        run = partial(tune_measured.measure, card, launch, problem, _say)
        _say(f"{number:3} of {len(work)}  {_told(problem, run)}")
    return True


def _told(problem: AttentionProblem, run: partial[Each]) -> str:
    """What came of measuring one problem. A card with too little memory for it goes on."""
    from lib_rocm_sd.engine import selftest

    try:
        each = run()
    except (RuntimeError, MemoryError) as error:
        if not selftest.is_out_of_memory(error):
            raise
        return f"{problem}: too little memory"
    if not each:
        return f"{problem}: no config of ours works"
    config, time_us = min(each.items(), key=lambda pair: pair[1])
    slowest = max(each.values())
    tile = f"{config.block_q} queries, {config.block_k} keys"
    return f"{problem}: {time_us:.1f} us with {tile}; {len(each)} configs, slowest {slowest:.1f} us"


# -- a contribution ------------------------------------------------------------------------------


def take_in(path: Path) -> int:
    """Check a file and merge it into this checkout's table of its GPU."""
    if path.is_symlink() or path.is_dir() or path.stat().st_size > tuned.MOST_BYTES:
        _err(f"{path} is refused: a link, a folder or too long a file")
        return FAILED
    data = path.read_bytes()
    wrong = problems(data)
    if wrong:
        for reason in wrong:
            _err(f"{path.name} is refused: {ascii(reason)[1:-1]}")
        return FAILED
    content = json.loads(data)
    gfx = content["gfx"]
    for section in content["sections"]:
        write(tuned.path_of(gfx, kernel.OP), with_section(gfx, section))
        _say(f"kernels/tuned/{gfx}/{kernel.OP}.json: {len(section['entries'])} choices")
    return DONE
