"""`python -m lib_rocm_sd tune`: which config of attention runs first on this GPU, what Performance
has measured here, as a file that an owner can contribute, and such a file into this checkout.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib_rocm_sd import checks
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.commands import support as cli_support
from lib_rocm_sd.doctor import text as doctor_text
from lib_rocm_sd.ops import tuned
from lib_rocm_sd.ops.attention import kernel
from lib_rocm_sd.tune import file as tuned_file

if TYPE_CHECKING:
    from lib_rocm_sd.ops.attention.problem import AttentionProblem
    from lib_rocm_sd.tune.export import Each, Gpu, Slot

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
    from lib_rocm_sd.doctor import card as selftest_card
    from lib_rocm_sd.tune import export as tune_export

    why = "" if path is None else checks.unwritable(path)
    if why:
        _err(f"--export: {why}")
        return UNUSABLE
    place, info = selftest_card.gpu(index)
    if place is None or info is None or info.arch is None:
        _err(f"nothing can be measured here: {selftest_card.why_not(info)}")
        return UNUSABLE
    card = tune_export.Gpu(place, info, info.arch)
    if measure and not _measured(card):
        return UNUSABLE
    entries, lacking = _entries(card)
    for slot in lacking:
        _say(f"not measured: {slot}")
    if path is not None and entries:
        section = tune_export.section_of(card, entries)
        content = tuned_file.new(card.arch.gfx, [section])
        wrong = tuned_file.problems(tuned_file.text_of(content).encode())
        if wrong:
            _err(f"{path.name} is not written: {'; '.join(wrong)}")
            return UNUSABLE
        tuned_file.write(path, content)
        _say(f"{path.name}: {len(entries)} choices for {info.name} ({card.arch.gfx}). It has no")
        _say("names of users, hosts or folders; CONTRIBUTING.md says where to send it.")
    if lacking:
        _say("With --measure what is missing is measured.")
    return FAILED if lacking else DONE


def _entries(card: Gpu) -> tuple[list[dict[str, Any]], list[Slot]]:
    """The lines of a table, and the slots for which there is none."""
    from lib_rocm_sd.tune import export as tune_export

    entries, lacking = [], []
    for slot in tune_export.SLOTS:
        entry = tune_export.entry_of(card, slot, tune_export.stored(card, slot))
        if entry is None:
            lacking.append(slot)
        else:
            entries.append(entry)
    return entries, lacking


def _measured(card: Gpu) -> bool:
    """Measure what is missing, a line for each problem; False where nothing can be launched."""
    from lib_rocm_sd.engine import planner, selftest
    from lib_rocm_sd.tune import export as tune_export

    work = [each for slot in tune_export.SLOTS for each in tune_export.missing(card, slot)]
    if not work:
        _say("All is measured already.")
        return True
    _say(f"{card.info.name} ({card.arch.gfx}): {len(work)} problems; this takes some minutes.")
    try:
        launch = planner.default_launcher(card.place, card.arch)
    except (RuntimeError, OSError) as error:
        _err(f"the driver cannot be used: {doctor_text.anonymous(selftest.describe(error))}")
        return False
    tune_export.compile_all(card, work, _say)
    for number, problem in enumerate(work, 1):
        run = partial(tune_export.measure, card, launch, problem, _say)
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
    wrong = tuned_file.problems(data)
    if wrong:
        for reason in wrong:
            _err(f"{path.name} is refused: {ascii(reason)[1:-1]}")
        return FAILED
    content = json.loads(data)
    gfx = content["gfx"]
    for section in content["sections"]:
        tuned_file.write(tuned.path_of(gfx, kernel.OP), tuned_file.with_section(gfx, section))
        _say(f"kernels/tuned/{gfx}/{kernel.OP}.json: {len(section['entries'])} choices")
    return DONE
