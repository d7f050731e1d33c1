"""`doctor --self-test`: every kernel and config on this machine's GPU against float64, with a file
that its owner can send.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib_rocm_sd import __version__, checks, device, first_trials
from lib_rocm_sd.commands.support import anonymous
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.lab.rows import write_json
from lib_rocm_sd.report import config_fields
from lib_rocm_sd.trials import verdicts
from lib_rocm_sd.trials.verdicts import DANGEROUS, MOST_TEXT, Verdict, without_folders

if TYPE_CHECKING:
    import torch

    from lib_rocm_sd.commands.selftest_cases import CardCase
    from lib_rocm_sd.device import DeviceInfo
    from lib_rocm_sd.ops.base import Launch
    from lib_rocm_sd.trials.conductor import Conductor
    from lib_rocm_sd.trials.place import Place
    from lib_rocm_sd.trials.subject import Subject

FORMAT = "rocm_sd self-test 1"
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


@dataclass(frozen=True)
class CardResult:
    """One case. `error`: max |output - reference| / max |reference|, infinite without an output.

    `seconds`: inputs, float64 on the CPU, launch and comparison; `compile_seconds` of all its
    kernels, whenever they were compiled. `reason` is empty when the case was passed.
    """

    op: str
    variant: str
    config: Any
    problem: str
    compilers: tuple[str, ...]
    compile_seconds: float
    error: float = math.inf
    tolerance: float = 0.0
    seconds: float = 0.0
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it: an infinite error is null."""
        found = asdict(self)
        found["error"] = self.error if math.isfinite(self.error) else None
        return found | {"compilers": list(self.compilers), "passed": not self.reason}


def main(out: Path | None, index: int | None, as_json: bool) -> int:
    """Test one GPU and write the file. 0: all passed, 1: something failed, 2: nothing was run."""
    say = partial(print, file=sys.stderr if as_json else sys.stdout, flush=True)
    why = "" if out is None else checks.unwritable(out)
    if why:
        say(f"The self-test was not run: --out: {why}.")
        return NOT_RUN
    place, info = gpu(index)
    if place is None or info is None or info.arch is None:
        say(f"The self-test was not run: {why_not(info)}.")
        say("It needs one of the GPUs in docs/cards.md, and a torch that can use it.")
        return NOT_RUN
    document = new_document(place)
    path = out or Path(f"rocm_sd-selftest-{info.gfx}-{document['date'][:10]}.json")
    try:
        verdicts = try_all(place, info, document, path, say)
        if dangerous(verdicts):
            say(UNSAFE)
            document["complete"] = True
            write_json(path, document)
            rows = []
        else:
            rows = run(place, info, document, path, say)
    except OSError as error:
        say(f"The self-test was not run: {path} cannot be written: {error.strerror or error}.")
        return NOT_RUN
    failed = [row for row in rows if row.reason]
    barred = [verdict for verdict in verdicts if not verdict.passed]
    if verdicts:
        passed = len(verdicts) - len(barred)
        say(f"{passed} of {len(verdicts)} kernels passed their trial in a process of their own.")
    say(f"{len(rows) - len(failed)} of {len(rows)} cases passed on {info.name} ({info.gfx}).")
    for row in failed:
        say(f"failed: {_named(row)}: {row.reason}")
    say(f"The result is in {path}. It has no names and no paths; docs/verification.md says where")
    say("to send it. Both outcomes are of use.")
    if as_json:
        print(json.dumps(document, indent=1))
    return FAILED if failed or barred else PASSED


def try_all(
    place: torch.device, info: DeviceInfo, document: dict[str, Any], path: Path, say: Say
) -> list[Verdict]:
    """Have each kernel tried in a process of its own, also one that is barred; the verdicts are in
    `document`, which is written after each. Raises OSError where it cannot be.
    """
    from lib_rocm_sd.engine.planner import default_launcher
    from lib_rocm_sd.trials import place as trial_place

    assert info.arch is not None
    try:
        here = trial_place.of(place, default_launcher(place, info.arch))
    except (RuntimeError, OSError):
        return []  # the cases say why

    def told(rows: list[dict[str, Any]]) -> None:
        document["verdicts"] = anonymous(rows)
        write_json(path, document)

    return [] if here is None else try_again(here, say, told)


def try_again(
    here: Place,
    say: Say,
    told: Callable[[list[dict[str, Any]]], None],
    conductor: Callable[..., Conductor] | None = None,
    listed: Sequence[Subject] | None = None,
) -> list[Verdict]:
    """Try each class that is tried ahead, and what other levels launch, also after a fault; `told`
    gets all verdicts so far.

    `conductor` and `listed` are for tests.
    """
    from lib_rocm_sd.trials.conductor import Conductor, resume

    if listed is None:
        listed = [
            *first_trials.all_classes(here.arch),
            *first_trials.further_classes(here.arch),
        ]
    found: list[Verdict] = []

    def one(subject: Subject, verdict: Verdict) -> None:
        found.append(verdict)
        told([each.as_dict() for each in found])
        say(f"{len(found):4} of {len(listed)}  {verdict_line(verdict.as_dict())}")

    say(RISK)
    resume(here)
    (conductor or Conductor)(here).run(listed, force=True, told=one)
    return found


def dangerous(found: Iterable[Verdict]) -> bool:
    """Whether anything would be risked by launching more in this process."""
    return any(verdict.outcome in DANGEROUS for verdict in found)


def verdict_line(row: dict[str, Any]) -> str:
    """One verdict."""
    if row["subject"] == "halt":
        return str(row["reason"])
    if row["outcome"] != verdicts.PASSED:
        return f"{row['outcome'].upper()}  {row['subject']}: {row['reason']}"
    notes = f" ({'; '.join(row['notes'])})" if row["notes"] else ""
    error = row["error"] or 0.0
    return f"passed  {row['subject']}: {error:.1e} of {row['tolerance']:.1e} allowed{notes}"


def gpu(index: int | None) -> tuple[torch.device | None, DeviceInfo | None]:
    """The GPU asked for, else the first that our kernels serve; without one, why not the first."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    places = [torch.device("cuda", each) for each in range(count)] or [torch.device("cpu")]
    if index is not None:
        places = [place for place in places if (place.index or 0) == index]
    infos = [device.identify(place) for place in places]
    for place, info in zip(places, infos, strict=True):
        if not info.reasons and info.arch is not None:
            return place, info
    return None, infos[0] if infos else None


def why_not(info: DeviceInfo | None) -> str:
    return "torch has no GPU of that number" if info is None else "; ".join(info.reasons)


def new_document(place: torch.device) -> dict[str, Any]:
    """The JSON document before the first case: the machine, without names and folders."""
    from lib_rocm_sd.lab.sensors import machine

    now = datetime.now(timezone.utc).replace(microsecond=0)
    found: dict[str, Any] = {
        "format": FORMAT,
        "date": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "rocm_sd": __version__,
        "machine": {**machine(place), "processor": platform.machine()},
        "running": None,
        "complete": False,
        "passed": 0,
        "failed": 0,
        "verdicts": [],
        "rows": [],
    }
    clean: dict[str, Any] = anonymous(found)
    return clean


def run(
    place: torch.device, info: DeviceInfo, document: dict[str, Any], path: Path, say: Say
) -> list[CardResult]:
    """Every case on `place`, each told by `say`; `document` grows and is written before each case,
    so that where the machine stops the file says at which. Raises OSError where it cannot be.
    """
    from lib_rocm_sd.commands import selftest_cases
    from lib_rocm_sd.engine.planner import default_launcher

    assert info.arch is not None
    wanted = selftest_cases.cases(info.arch)
    write_json(path, document)
    say(f"{info.name} ({info.gfx}): {len(wanted)} cases; this may take some minutes.")
    _compile(wanted, info, say)
    try:
        launch, why = default_launcher(place, info.arch), ""
    except (RuntimeError, OSError) as error:
        launch, why = None, _short(error)
    rows: list[CardResult] = []
    for number, case in enumerate(wanted, 1):
        document["running"] = f"{case.op.name}, {case.variant.name}: {case.problem}"
        write_json(path, document)
        row = tested(case, launch, place, info) if launch else _untested(case, why)
        rows.append(row)
        document["rows"].append(row.as_dict())
        document["failed" if row.reason else "passed"] += 1
        say(f"{number:4} of {len(wanted)}  {_told(row)}")
    document |= {"running": None, "complete": True}
    write_json(path, document)
    return rows


def _compile(wanted: Sequence[CardCase], info: DeviceInfo, say: Say) -> None:
    """Compile what is not cached, as many at a time as there are cores."""
    from lib_rocm_sd.runtime import build

    assert info.arch is not None
    every = dict.fromkeys(spec for case in wanted for spec in case.specs)
    missing = [spec for spec in every if not build.is_cached(spec, info.arch)]
    step = 2 * (os.cpu_count() or 1)
    for done in range(0, len(missing), step):
        say(f"compiling: {done} of {len(missing)} kernels are done")
        build.build_all(missing[done : done + step], info.arch)


def tested(case: CardCase, launch: Launch, place: torch.device, info: DeviceInfo) -> CardResult:
    """One case on `place`. Whatever it dies of is its reason."""
    from lib_rocm_sd.engine import selftest
    from lib_rocm_sd.runtime import build

    assert info.arch is not None
    begun = _untested(case, "")
    try:
        codes = [build.build(spec, info.arch) for spec in case.specs]
    except CompileError as error:
        return _untested(case, f"does not compile: {_short(error)}")
    names = tuple(dict.fromkeys(code.compiler for code in codes))
    start = time.monotonic()
    try:
        check = selftest.check(case.op, case.variant, case.config, launch, case.problem, place)
        worst, reason = check.error, _clean(check.reason)
    except (RuntimeError, MemoryError) as failure:  # "out of memory" is not the kernel's fault
        worst, reason = math.inf, _short(failure)
    seconds = round(time.monotonic() - start, 3)
    compiling = round(sum(code.seconds for code in codes), 3)
    limit = case.op.tolerance(case.problem)
    about = (begun.op, begun.variant, begun.config, begun.problem, names, compiling)
    return CardResult(*about, worst, limit, seconds, reason)


def _untested(case: CardCase, reason: str) -> CardResult:
    about = (case.op.name, case.variant.name, config_fields(case.config), str(case.problem))
    return CardResult(*about, (), 0.0, reason=reason)


def _named(row: CardResult) -> str:
    values = row.config.values() if isinstance(row.config, dict) else []
    config = " ".join(str(value) for value in values)
    return f"{row.op}, {row.variant}: {row.problem}{f' [{config}]' if config else ''}"


def _told(row: CardResult) -> str:
    if row.reason:
        return f"FAILED  {_named(row)}: {row.reason}"
    return f"{row.error:.1e} of {row.tolerance:.1e} allowed  {_named(row)}"


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return _clean(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)


def _clean(text: str) -> str:
    hidden: str = anonymous(text)
    return without_folders(hidden)[:MOST_TEXT]
