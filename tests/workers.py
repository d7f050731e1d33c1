"""`pytest --workers N`: processes that are forked after the tests were collected.

Those of pytest-xdist would collect all of them again, a quarter of a minute each. A worker asks for
the next group of tests when it is done with one. It ends as a session of its own, but for its
reports, which the parent makes. A system without fork (Windows) has one process.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

_own: list[Path] = []


def own_cache() -> None:
    """Give this process, and those that it starts, an empty cache folder in place of the user's."""
    _own.append(Path(tempfile.mkdtemp(prefix="rocm_sd_tests_")))
    os.environ.update(XDG_CACHE_HOME=str(_own[-1]), LOCALAPPDATA=str(_own[-1]))
    if "lib_rocm_sd.cache" in sys.modules:
        sys.modules["lib_rocm_sd.cache"].reset()


def remove_own_cache() -> None:
    """Once the tests have ended."""
    shutil.rmtree(_own[-1], ignore_errors=True)


@dataclass
class Process:
    """A worker as its parent sees it."""

    pid: int
    left: list[int] = field(default_factory=list)
    """Tests, by their place in the session. The first is running, or is the next."""
    ended: bool = False


class Workers:
    """The parent. `group_of` names the group of a test: one worker has all tests of a group."""

    def __init__(self, count: int, group_of: Callable[[pytest.Item], str]) -> None:
        self.count = count
        self.group_of = group_of
        self.groups: list[list[int]] = []
        self.processes: dict[Connection, Process] = {}
        self.started = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None
        groups: dict[str, list[int]] = {}
        for number, item in enumerate(session.items):
            groups.setdefault(self.group_of(item), []).append(number)
        self.groups = [*groups.values()]
        reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.showfspath = False  # tests of several files end in turn
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        gc.collect()
        gc.freeze()  # the workers share what is here
        try:
            while True:
                if session.shouldstop or session.shouldfail:
                    self.groups.clear()
                while self.groups and len(self.processes) < self.count:
                    if (link := self._fork()) is not None:
                        Worker(session, link, self.started).work()
                        return True
                if not self.processes:
                    break
                for spoken in wait([*self.processes]):
                    self._hear(session, spoken)
        finally:
            for process in self.processes.values():
                os.kill(process.pid, signal.SIGINT)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        return True

    def _fork(self) -> Connection | None:
        """Start a worker; in it, its end of the link."""
        here, there = Pipe()
        self.started += 1
        pid = os.fork()
        if pid:
            there.close()
            self.processes[here] = Process(pid)
            return None
        for other in (here, *self.processes):
            other.close()
        self.processes.clear()
        return there

    def _hear(self, session: pytest.Session, link: Any) -> None:
        process, hook = self.processes[link], session.config.hook
        try:
            what, told = link.recv()
        except (EOFError, ConnectionError):
            self._after(session, link)
            return
        if what == "next":
            process.left = self.groups.pop(0) if self.groups else []
            with suppress(ConnectionError):
                link.send(process.left)
        elif what == "report":
            report = hook.pytest_report_from_serializable(config=session.config, data=told)
            hook.pytest_runtest_logreport(report=report)
        elif what == "warning":
            text, category, place = told.pop("message")
            kind = type(category, (Warning,), {})
            message = warnings.WarningMessage(text, kind, *place)
            hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": message, **told})
        elif what == "ended":
            process.ended = True
        else:
            getattr(hook, what)(**told)
            if what == "pytest_runtest_logfinish":
                del process.left[0]

    def _after(self, session: pytest.Session, link: Connection) -> None:
        """A worker is gone. The test in which it died failed, others get the rest of the group."""
        process = self.processes.pop(link)
        status = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        if process.ended and status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        nodeid, place = "after its last test", ("", None, "")
        if process.left:
            died = session.items[process.left[0]]
            nodeid, place = died.nodeid, died.location  # type: ignore[assignment]
            self.groups[:0] = [process.left[1:]] if process.left[1:] else []
        why = f"the worker that ran it ended with {status}"
        report = pytest.TestReport(nodeid, place, {}, "failed", why, "call")
        session.config.hook.pytest_runtest_logreport(report=report)


class Worker:
    """In a worker: runs what the parent gives, and tells it what pytest would report."""

    def __init__(self, session: pytest.Session, link: Connection, number: int) -> None:
        self.session, self.config, self.link = session, session.config, link
        plugins: Any = self.config.pluginmanager
        self.config.workerinput = {}  # type: ignore[attr-defined]  # plugins leave files to the parent
        plugins.get_plugin("ledger").worker = True
        for plugin in plugins.get_plugins():
            if type(plugin).__name__ in ("TerminalReporter", "Workers"):
                plugins.unregister(plugin)
        plugins.register(self, "worker")
        capture = plugins.get_plugin("capturemanager")
        capture.stop_global_capturing()  # its files are the parent's
        capture.start_global_capturing()
        capture.suspend_global_capture()
        factory: Any = self.config._tmp_path_factory  # type: ignore[attr-defined]
        factory._basetemp = factory.getbasetemp() / f"worker{number}"
        factory._basetemp.mkdir(mode=0o700)
        own_cache()

    def work(self) -> None:
        """Until there is nothing left to do."""
        for group in self._groups():
            following: list[Any] = [*group[1:], self.session]
            for item, after in zip(group, following, strict=True):
                self.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                if self.session.shouldfail or self.session.shouldstop:
                    return

    def _groups(self) -> Iterator[list[pytest.Item]]:
        while True:
            self.tell("next", None)
            numbers = self.link.recv()
            if not numbers:
                return
            yield [self.session.items[number] for number in numbers]

    def tell(self, what: str, told: Any) -> None:
        self.link.send((what, told))

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.tell("pytest_runtest_logstart", {"nodeid": nodeid, "location": location})

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.tell("pytest_runtest_logfinish", {"nodeid": nodeid, "location": location})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self.config.hook
        data = hook.pytest_report_to_serializable(config=self.config, report=report)
        self.tell("report", data)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        place = warning_message.filename, warning_message.lineno
        message = str(warning_message.message), warning_message.category.__name__, place
        told = {"message": message, "when": when, "nodeid": nodeid, "location": location}
        self.tell("warning", told)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        self.tell("ended", None)
