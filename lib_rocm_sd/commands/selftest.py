"""`doctor --self-test`: every kernel and config on this machine's GPU against float64, with a file
that its owner can send. `child` is the same for a program that shows how far it is.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lib_rocm_sd import __version__, cache, checks, first_trials
from lib_rocm_sd.checks import UsageError
from lib_rocm_sd.commands.support import Gpu, Step, anonymous, compile_missing, gpu, unseen
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.lab.card_file import FORMAT, by_op, file_name
from lib_rocm_sd.lab.rows import Columns, Row, write_json
from lib_rocm_sd.report import config_fields
from lib_rocm_sd.runtime import compile_worker
from lib_rocm_sd.trials import verdicts
from lib_rocm_sd.trials.child import answers, quiet
from lib_rocm_sd.trials.verdicts import DANGEROUS, MOST_TEXT, Verdict, without_folders

if TYPE_CHECKING:
    from lib_rocm_sd.ops.base import Launch
    from lib_rocm_sd.trials.place import Place
    from lib_rocm_sd.trials.subject import Subject

UNSAFE = (
    "The other cases, which run in this process, are left out: a kernel ended its process, or hung."
)
PASSED, FAILED, NOT_RUN = 0, 1, 2
"""Exit codes."""

RISK = (
    "First each kernel is tried in a process of its own. One that is at fault may freeze the "
    "screen for some seconds, or until the machine is restarted: save your work."
)

Say = Callable[[str], None]


COLUMNS = Columns(
    "op variant config problem compilers compile_seconds error tolerance seconds reason"
)
"""Of a case; `passed` stands beside them. `error`: max |output - reference| / max |reference|, null
without an output. `seconds`: inputs, float64 on the CPU, launch and comparison; `compile_seconds`
of all its kernels, whenever they were compiled. `reason` is empty when the case was passed.
"""


def named(row: Row) -> str:
    """A case, in a line."""
    values = row.config.values() if isinstance(row.config, dict) else []
    config = " ".join(str(value) for value in values)
    return f"{row.op}, {row.variant}: {row.problem}{f' [{config}]' if config else ''}"


def serve(asked: Mapping[str, Any]) -> NoReturn:
    """`child` as a process of its own. It ends at once: Python would wait for the thread that
    reads, and abort.
    """
    quiet()
    status = 3
    try:
        status = child(**asked, say=answers())
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def child(
    out: str, index: int, folder: str, first: Sequence[str], say: Callable[[dict[str, Any]], object]
) -> int:
    """As `main`, but tells `say` of each step; ends with its input, too. `folder`: the host's for
    the cache, or empty. `first`: libraries that are loaded before torch, ZLUDA's.
    """

    def step(text: str, done: int, total: int) -> None:
        say({"text": text, "done": done, "total": total})

    def ends_with_parent() -> None:
        sys.stdin.buffer.read()
        os._exit(NOT_RUN)

    threading.Thread(target=ends_with_parent, daemon=True).start()
    cache.set_directory(folder or None)
    try:
        compile_worker.load_before_torch(first)
    except OSError as error:
        print(f"The self-test was not run: ZLUDA cannot be loaded: {error}.", file=sys.stderr)
        return NOT_RUN
    return main(Path(out), index, False, step)


def main(out: Path | None, index: int | None, as_json: bool, step: Step = unseen) -> int:
    """Test one GPU and write the file. 0: all passed, 1: something failed, 2: nothing was run.

    Where stdout has other things, `as_json` or `step`, people read stderr.
    """
    aside = as_json or step is not unseen
    say = partial(print, file=sys.stderr if aside else sys.stdout, flush=True)
    why = "" if out is None else checks.unwritable(out)
    if why:
        say(f"The self-test was not run: --out: {why}.")
        return NOT_RUN
    try:
        card = gpu(index)
    except UsageError as error:
        say(f"The self-test was not run: {error}.")
        say("It needs one of the GPUs in docs/cards.md, and a torch that can use it.")
        return NOT_RUN
    document = new_document(card)
    path = out or Path(file_name(str(card.info.gfx), document["date"][:10]))
    rows: list[Row] = []
    try:
        cases = ready(card, document, path, say, step)
        verdicts = try_all(card, document, path, say, step)
        if any(verdict.outcome in DANGEROUS for verdict in verdicts):
            say(UNSAFE)
            document["complete"] = True
            write_json(path, document)
        else:
            rows = run(cases, card, document, path, say, step)
    except OSError as error:
        say(f"The self-test was not run: {path} cannot be written: {error.strerror or error}.")
        return NOT_RUN
    failed = [row for row in rows if row.reason]
    passed = sum(verdict.passed for verdict in verdicts)
    if verdicts:
        say(f"{passed} of {len(verdicts)} kernels passed their trial in a process of their own.")
    right = f"{len(rows) - len(failed)} of {len(rows)} cases passed"
    say(f"{right} on {card.info.name} ({card.info.gfx}).")
    for row in failed:
        say(f"failed: {named(row)}: {row.reason}")
    say(f"The result is in {path}. It has no names and no paths; docs/verification.md says where")
    say("to send it. Both outcomes are of use.")
    if as_json:
        print(json.dumps(document, indent=1))
    return FAILED if failed or passed < len(verdicts) else PASSED


def new_document(card: Gpu) -> dict[str, Any]:
    """The JSON document before the first case: the machine, without names and folders."""
    from lib_rocm_sd.lab.sensors import machine

    document: dict[str, Any] = {
        "format": FORMAT,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "rocm_sd": __version__,
        "machine": {**machine(card.place), "processor": platform.machine()},
        "running": None,
        "complete": False,
        "planned": 0,
        "passed": 0,
        "failed": 0,
        "verdicts": [],
        "rows": [],
    }
    clean: dict[str, Any] = anonymous(document)
    return clean


def ready(card: Gpu, document: dict[str, Any], path: Path, say: Say, step: Step) -> list[Subject]:
    """Compile all kernels, whose tests are in the cases. Raises OSError where `path` cannot be
    written.
    """
    from lib_rocm_sd.commands import selftest_cases

    cases = selftest_cases.cases(card.arch)
    document["planned"] = len(cases)
    write_json(path, document)
    say(f"{card.info.name} ({card.info.gfx}): {len(cases)} cases; this may take some minutes.")
    compile_missing((spec for case in cases for spec in case.specs), card.arch, say, step)
    return cases


# -- each kernel in a process of its own ----------------------------------------------------------


def try_all(card: Gpu, document: dict[str, Any], path: Path, say: Say, step: Step) -> list[Verdict]:
    """Have each kernel tried in a process of its own, also one that is barred; the verdicts are in
    `document`, which is written before each, so that where the machine stops it says at which.
    Raises OSError where it cannot be.
    """
    from lib_rocm_sd.engine.planner import default_launcher
    from lib_rocm_sd.trials import place as trial_place

    try:
        here = trial_place.of(card.place, default_launcher(card.place, card.arch))
    except (RuntimeError, OSError):
        return []  # the cases say why

    if here is None:
        return []
    listed = first_trials.all_classes(card.arch) + first_trials.further_classes(card.arch)
    document["planned"] += len(listed)
    step("testing kernels in a process of their own", 0, document["planned"])

    def told(rows: list[dict[str, Any]]) -> None:
        document["verdicts"] = anonymous(rows)
        document["running"] = str(listed[len(rows)]) if len(rows) < len(listed) else None
        write_json(path, document)
        if rows:
            step(f"testing {by_op(rows[-1])}", len(rows), document["planned"])

    told([])
    verdicts = try_again(here, say, told, listed)
    document["running"] = None
    return verdicts


def try_again(
    here: Place,
    say: Say,
    told: Callable[[list[dict[str, Any]]], None],
    listed: Sequence[Subject],
) -> list[Verdict]:
    """Try each of these classes, also after a fault; `told` gets all verdicts so far."""
    from lib_rocm_sd.trials.conductor import Conductor, resume

    verdicts: list[Verdict] = []

    def one(subject: Subject, verdict: Verdict) -> None:
        verdicts.append(verdict)
        told([each.as_dict() for each in verdicts])
        say(f"{len(verdicts):4} of {len(listed)}  {verdict_line(verdict.as_dict())}")

    say(RISK)
    resume(here)
    Conductor(here).run(listed, force=True, told=one)
    return verdicts


def verdict_line(row: dict[str, Any]) -> str:
    """One verdict."""
    if row["subject"] == "halt":
        return str(row["reason"])
    if row["outcome"] != verdicts.PASSED:
        return f"{row['outcome'].upper()}  {row['subject']}: {row['reason']}"
    notes = f" ({'; '.join(row['notes'])})" if row["notes"] else ""
    error = row["error"] or 0.0
    return f"passed  {row['subject']}: {error:.1e} of {row['tolerance']:.1e} allowed{notes}"


# -- each config in this process ------------------------------------------------------------------


def run(
    cases: Sequence[Subject],
    card: Gpu,
    document: dict[str, Any],
    path: Path,
    say: Say,
    step: Step,
) -> list[Row]:
    """Every case, each told by `say`; `document` grows and is written before each case, so that
    where the machine stops the file says at which. Raises OSError where it cannot be.
    """
    from lib_rocm_sd.engine.planner import default_launcher
    from lib_rocm_sd.engine.selftest import describe

    launch, why = None, ""
    try:
        launch = default_launcher(card.place, card.arch)
    except (RuntimeError, OSError) as error:
        why = _clean(describe(error))
    rows: list[Row] = []
    for number, case in enumerate(cases, 1):
        document["running"] = f"{case.op.name}, {case.variant.name}: {case.problem}"
        write_json(path, document)
        before = document["planned"] - len(cases)
        step(f"testing {case.op.name}", before + number, document["planned"])
        row = Row(
            op=case.op.name,
            variant=case.variant.name,
            config=config_fields(case.config),
            problem=str(case.problem),
            reason=why,
        )
        row = tested(row, case, launch, card) if launch else row
        rows.append(row)
        document["rows"].append({**COLUMNS.as_json(row), "passed": not row.reason})
        document["failed" if row.reason else "passed"] += 1
        verdict = f"{row.error:.1e} of {row.tolerance:.1e} allowed  {named(row)}"
        verdict = f"FAILED  {named(row)}: {row.reason}" if row.reason else verdict
        say(f"{number:4} of {len(cases)}  {verdict}")
    document |= {"running": None, "complete": True}
    write_json(path, document)
    return rows


def tested(row: Row, case: Subject, launch: Launch, card: Gpu) -> Row:
    """What became of a case. Whatever it dies of is its reason."""
    from lib_rocm_sd.engine import selftest
    from lib_rocm_sd.runtime import build

    try:
        codes = [build.build(spec, card.arch) for spec in case.specs]
    except CompileError as error:
        return replace(row, reason=f"does not compile: {_clean(selftest.describe(error))}")
    start = time.monotonic()
    try:
        check = selftest.check(case.op, case.variant, case.config, launch, case.problem, card.place)
        worst, reason = check.error, _clean(check.reason)
    except (RuntimeError, MemoryError) as failure:  # "out of memory" is not the kernel's fault
        worst, reason = math.inf, _clean(selftest.describe(failure))
    return replace(
        row,
        compilers=tuple(dict.fromkeys(_clean(code.compiler) for code in codes)),
        compile_seconds=round(sum(code.seconds for code in codes), 3),
        error=worst,
        tolerance=case.op.tolerance(case.problem),
        seconds=round(time.monotonic() - start, 3),
        reason=reason,
    )


def _clean(text: str) -> str:
    hidden: str = anonymous(text)
    return without_folders(hidden)[:MOST_TEXT]
