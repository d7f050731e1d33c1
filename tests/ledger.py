"""Chooses what is executed, says how much that was, keeps what was right: tests/executed.py.

What is not known is executed. `--sweeps` has every case of every test (tests/sweeps.py), and
executes a ninetieth of the rest, another each day. `--all` executes all and writes the file,
`--record` adds what this run executed; both have every case. Tests that are named (a file, `::`,
`-k`) have it too, and are executed whether known or not.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import compiled, executed
from tests.executed import Code, Entry

if TYPE_CHECKING:
    from tests.noted import Codes

UNFINISHED = compiled.FOLDER.with_name("executed-unfinished.jsonl")
"""What `--all` found right before it was interrupted: the next one goes on there."""
MUST_EXECUTE = "ROCM_SD_MUST_EXECUTE"
"""Where it is set, a run of the whole suite fails where less machine code than FLOORS say is
executed or known to be right.
"""
ROTATION = 105
"""Days within which all that is known is executed once more."""
MOST_A_DAY = 110
"""Known tests that a day may have on average. A ledger that has grown beyond needs a longer
rotation, or more minutes a day.
"""
MACHINE = ("tests/verify/amdgpu/", "tests/verify/amdgpu_host/")
CASES = "tests/verify/amdgpu/test_amdgpu_kernels.py::test_machine_code_is_right "
CONFIGS = (
    "tests/verify/amdgpu/test_amdgpu_kernels.py::test_nearly_all_of_a_shipped_kernel_is_executed "
)
FLOORS = {"GPUs": 5, "kernels": 14, "configs": 780, "cases": 1950}
""""configs": each kernel's forms and tile sizes, on each GPU. Raise them with what is added."""
THINNED_FLOORS = {"GPUs": 5, "kernels": 14, "configs": 100, "cases": 300}
"""Of a run without `--sweeps`."""


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="execute also what is known to be right")
    parser.addoption("--sweeps", action="store_true", help="run every case of each sweep")
    parser.addoption("--record", action="store_true", help="write what was right to executed.json")


def due(turn: int, day: int) -> bool:
    """Whether a known test has its turn."""
    return turn % ROTATION == day % ROTATION


def counted(entries: Iterable[Entry]) -> dict[str, int]:
    """What FLOORS are about, of these."""
    tests = [entry.test for entry in entries]
    configs = [test.removeprefix(CONFIGS).split() for test in tests if test.startswith(CONFIGS)]
    return {
        "GPUs": len({gfx for gfx, _ in configs}),
        "kernels": len({kernel for _, kernel in configs}),
        "configs": len(configs),
        "cases": sum(test.startswith(CASES) for test in tests),
    }


def shortcomings(found: dict[str, int], floors: dict[str, int]) -> list[str]:
    """Why too little was executed: no compiler or decoder, or less than `floors` say."""
    from tests.verify.amdgpu.launch import missing

    reason = missing()
    less = [
        f"{found[what]} {what} of {least}" for what, least in floors.items() if found[what] < least
    ]
    return ([reason] if reason else []) + less


class Ledger:
    """What one process knows and finds: the only one, the parent of workers, or a worker."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.worker = False
        self.everything = bool(config.getoption("all"))
        self.records = self.everything or bool(config.getoption("record"))
        self.named = bool(config.option.keyword) or any(
            "::" in word or word.endswith(".py") for word in config.args
        )
        self.thinned = not (self.records or self.named or config.getoption("sweeps"))
        """Whether sweeps have a part of their cases only."""
        self.whole = (
            config.args_source == pytest.Config.ArgsSource.TESTPATHS
            and not config.option.keyword
            and not config.option.markexpr
        )
        self.known = executed.read()
        self.codes = executed.read_codes()
        self.used: set[Code] = set()
        self.day = date.today().toordinal()
        self.done = frozenset(map(Entry._make, _lines(UNFINISHED) if self.everything else ()))
        self.sources = executed.sources() if self.records else ""
        self.collected: set[Entry] = set()
        self.right: set[Entry] = set()
        self.wrong: set[Entry] = set()
        self.machine: Counter[str] = Counter()
        self.why_not = ""
        self.edited = False

    # -- choosing

    def is_executed(self, entry: Entry, turn: int) -> bool:
        if self.everything:
            return entry not in self.done
        has_turn = not self.thinned and due(turn, self.day)
        return self.named or entry not in self.known or has_turn

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """A test that is known by what it executes ends here, if that is known."""
        if executed.mark_of(pyfuncitem) is None:
            return None
        entry = executed.entry_of(pyfuncitem, self.noted)
        if entry is None:
            return None
        is_new = self.is_executed(entry, executed.turn_of(pyfuncitem, entry))
        used = [tuple(each) for each in self.noted.taken()]
        told = [("executed", tuple(entry)), ("codes", used), ("is new", is_new)]
        pyfuncitem.user_properties += told
        return None if is_new else True

    @cached_property
    def noted(self) -> Codes:
        """Where torch is, which its tests ask for."""
        from tests.noted import Codes

        return Codes(self.codes)

    # -- the results

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.worker:
            return
        told: dict[str, Any] = dict(report.user_properties)
        is_new = told.get("is new", True)
        if report.nodeid.startswith(MACHINE) and is_new:
            self.count(report)
        if "executed" not in told:
            return
        entry = Entry._make(told["executed"])
        self.used |= set(map(Code._make, told.get("codes", ())))
        self.collected.add(entry)
        if report.failed:
            self.wrong.add(entry)
        elif report.when == "call" and report.passed and is_new:
            self.right.add(entry)
            if self.everything:
                _append(UNFINISHED, entry)

    def count(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self.why_not = self.why_not or report.longrepr[2]
        if report.when == "call" and not report.skipped:
            self.machine["executed"] += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.worker:
            return
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if self.records and ended and not self.config.option.collectonly:
            self.keep()
        if self.too_little() and os.environ.get(MUST_EXECUTE) and exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def keep(self) -> None:
        if self.sources != executed.sources():
            UNFINISHED.unlink(missing_ok=True)
            self.edited = True
            return
        right = (self.right | self.done) & self.collected
        executed.write(
            executed.merged(self.known, self.collected, right, self.wrong, whole=self.whole),
            self.used if self.whole else self.used | self.codes,
        )
        UNFINISHED.unlink(missing_ok=True)

    def sound(self) -> set[Entry]:
        """What was executed now or before, and was right."""
        return {*(self.collected & (self.known | self.done)), *self.right} - self.wrong

    def too_little(self) -> list[str]:
        """Why a run of the whole suite does not count as one."""
        if not self.whole or self.config.option.collectonly:
            return []
        return shortcomings(counted(self.sound()), THINNED_FLOORS if self.thinned else FLOORS)

    # -- the summary

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.config.option.collectonly or not (self.collected or self.whole):
            return
        terminalreporter.section("executed before, executed now")
        for line in self.lines():
            terminalreporter.write_line(line)

    def lines(self) -> list[str]:
        known = self.known & self.collected
        again, new = len(self.right & known), len(self.right - known)
        found = [
            f"ledger: {len(known)} of {len(self.collected)} known, {again} re-executed today, "
            f"{new} new" + (f", {len(self.done)} before an interruption" if self.done else "")
        ]
        if self.thinned:
            found.append("sweeps: a part of each (tests/sweeps.py); --sweeps has every case")
        mine = {entry.compiler for entry in self.collected}
        for name in sorted(mine - {entry.compiler for entry in self.known}):
            others = ", ".join(sorted({entry.compiler for entry in self.known})) or "nothing"
            found.append(f"ledger: nothing is known of {name}, so all is executed; it has {others}")
        for entry in sorted(self.wrong & known):
            found.append(f"LEDGER IS WRONG: {entry.test} is known to be right as {entry.key}")
        if self.edited:
            found.append("ledger: sources were edited during the run, so nothing of it is kept")
        count = sum(entry.test.startswith(MACHINE) for entry in known - self.right)
        if self.machine["executed"]:
            times = f"{self.machine['executed']} tests executed it now"
            found.append(f"machine code: {times}, {count} more are known to be right")
        elif self.whole:
            why = self.why_not or "no test of it ran"
            found.append(f"MACHINE CODE WAS NOT EXECUTED: {why}; {count} are known to be right")
        counts = counted(self.sound())
        if self.whole or any(counts.values()):
            each = ", ".join(f"{number} {what}" for what, number in counts.items())
            found.append(f"machine code, executed now or known: {each}")
        for why in self.too_little():
            found.append(f"TOO LITTLE MACHINE CODE WAS EXECUTED: {why}")
        return found


def _lines(path: Path) -> list[Any]:
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [json.loads(text) for text in texts if text.endswith("]")]  # the last may be cut off


def _append(path: Path, entry: Entry) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
