"""`--workers N`: tests run in N processes, forked when all is collected: to import and collect it
takes ten to twenty seconds, which each would spend for itself.

A worker has the tests of a scope at a time, in general a file's, and asks for the next when these
have ended. One that dies is reported as the failure of the test that it was in, and replaced.
Where Python cannot fork (Windows), tests run in this process.
"""

from __future__ import annotations

import gc
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import wait
from pickle import PickleError
from typing import Any

import pytest

DIED = "the worker ended in this test, with status {}"


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="processes, each with a part of tests")


@dataclass
class Worker:
    """A process, as its parent sees it. `left`: places of tests that it has and has not ended."""

    process: Any
    pipe: Any
    left: list[int] = field(default_factory=list)


class Workers:
    """The plugin of the process that collects. `scope_of` names what one worker has at a time, by a
    test's id; `begin` is called in each worker.
    """

    def __init__(
        self, scope_of: Callable[[str], str], begin: Callable[[pytest.Config], None]
    ) -> None:
        self.scope_of, self.begin = scope_of, begin
        self.context: Any = get_context("fork")
        self.workers: list[Worker] = []
        self.scopes: deque[list[int]] = deque()
        self.count = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None
        by_name: dict[str, list[int]] = {}
        for place, item in enumerate(session.items):
            by_name.setdefault(self.scope_of(item.nodeid), []).append(place)
        self.scopes.extend(by_name.values())
        terminal: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.showfspath = False  # tests of several files take turns
        gc.collect()
        gc.freeze()  # pages that no worker writes to are everybody's
        try:
            for _ in range(min(session.config.option.workers, len(self.scopes))):
                self.start(session)
            while self.workers:
                for pipe in wait([each.pipe for each in self.workers]):
                    (worker,) = (each for each in self.workers if each.pipe is pipe)
                    self.hear(session, worker)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
        finally:
            for worker in self.workers:
                worker.process.terminate()
        return True

    def start(self, session: pytest.Session) -> None:
        """Fork one more."""
        self.count += 1
        ours, theirs = self.context.Pipe()
        others = [ours, *(each.pipe for each in self.workers)]
        arguments = (session, theirs, others, f"worker{self.count}", self.begin)
        process = self.context.Process(target=work, args=arguments)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: none holds a lock
            process.start()
        theirs.close()
        self.workers.append(Worker(process, ours))

    def hear(self, session: pytest.Session, worker: Worker) -> None:
        """One message of a worker, or its end."""
        hook = session.config.hook
        try:
            kind, told = worker.pipe.recv()
        except EOFError:
            self.ended(session, worker)
            return
        if kind == "asks":
            worker.left = self.scopes.popleft() if self.scopes else []
            worker.pipe.send(worker.left)
        elif kind == "report":
            hook.pytest_runtest_logreport(report=told)
            if told.when == "teardown" and worker.left:
                worker.left = worker.left[1:]
        else:
            text, category, *place = told.pop("warning")
            message = warnings.WarningMessage(text, type(category, (Warning,), {}), *place)
            hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": message, **told})

    def ended(self, session: pytest.Session, worker: Worker) -> None:
        worker.process.join()
        self.workers.remove(worker)
        status = worker.process.exitcode
        if not worker.left:
            if status:
                raise RuntimeError(f"a worker ended with status {status} between two tests")
            return
        item = session.items[worker.left[0]]
        report = pytest.TestReport(
            item.nodeid, item.location, {}, "failed", DIED.format(status), "call"
        )
        session.config.hook.pytest_runtest_logreport(report=report)
        if worker.left[1:]:
            self.scopes.appendleft(worker.left[1:])
        if self.scopes:
            self.start(session)


class Teller:
    """The plugin of a worker: what is reported there, its parent hears."""

    def __init__(self) -> None:
        self.pipe: Any = None  # warnings of before come again when it registers

    def tell(self, kind: str, told: Any = None) -> None:
        if self.pipe is not None:
            self.pipe.send((kind, told))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        try:
            self.tell("report", report)
        except (TypeError, AttributeError, ValueError, PickleError):
            report.longrepr = str(report.longrepr)
            self.tell("report", report)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        one = warning_message
        text = (str(one.message), one.category.__name__, one.filename, one.lineno)
        self.tell(
            "warning", {"warning": text, "when": when, "nodeid": nodeid, "location": location}
        )


class Sibling(pytest.Item):
    """Stands for the test that comes next while nobody knows which: a module's fixtures stay."""

    def runtest(self) -> None:
        raise NotImplementedError


def work(
    session: pytest.Session,
    pipe: Any,
    others: Sequence[Any],
    name: str,
    begin: Callable[[Any], None],
) -> None:
    """Be a worker until no scope is left. `others`: ends of pipes that are the parent's."""
    for each in others:
        each.close()
    config: Any = session.config
    manager = config.pluginmanager
    manager.unregister(name="terminalreporter")
    base = config._tmp_path_factory.getbasetemp() / name
    base.mkdir()
    config._tmp_path_factory._basetemp = base
    teller = Teller()
    manager.register(teller)
    teller.pipe = pipe
    capture = manager.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()  # into files of its own
    try:
        begin(config)
        run(session, teller)
    finally:
        capture.stop_global_capturing()  # what ends it is seen


def run(session: Any, teller: Teller) -> None:
    """Ask for scopes and run them."""
    last: Any = None
    while not session.shouldfail:
        teller.tell("asks")
        tests = [session.items[place] for place in teller.pipe.recv()]
        if last is not None:
            leave(session, last, tests[0] if tests else None)
        if not tests:
            return
        last = tests[-1]
        following = [*tests[1:], Sibling.from_parent(last.parent, name="next")]
        for item, after in zip(tests, following, strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if session.shouldfail:
                break


def leave(session: Any, last: pytest.Item, following: pytest.Item | None) -> None:
    """End the fixtures that `following` does not share; a failure is the last test's."""
    call = pytest.CallInfo.from_call(
        lambda: session._setupstate.teardown_exact(following),
        when="teardown",
        reraise=(KeyboardInterrupt,),
    )
    if call.excinfo is not None:
        report = last.ihook.pytest_runtest_makereport(item=last, call=call)
        last.ihook.pytest_runtest_logreport(report=report)
