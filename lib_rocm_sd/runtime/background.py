"""Compile while the program goes on: in threads of its own, at low priority.

What is needed first comes first. A part (the op or program that needs some kernels) is ready when
each of its kernels was compiled or tried.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lib_rocm_sd import cache
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import build, process

MOST_AT_A_TIME = 16
"""Each takes about 130 MiB."""
FAILURES_BEFORE_GIVING_UP = 3
"""So many in a row mean that nothing compiles here."""
SHOWN_EVERY_S = 15.0
REASON_CHARACTERS = 200

Say = Callable[[str], None]
Told = Callable[[str], None]


def _nothing(part: str) -> None:
    pass


@dataclass(frozen=True)
class BackgroundState:
    """How far it is: `done` of `total` kernels were compiled or tried.

    `failure` is the first one's reason in a line, empty if there was none; `log_path` the file
    that has all of what the compilers said, empty if there is none.
    """

    running: bool = False
    done: int = 0
    total: int = 0
    failure: str = ""
    log_path: str = ""


@dataclass(frozen=True)
class _Job:
    spec: KernelSpec
    arch: Arch
    part: str


class Background:
    """One per process, `background`; others exist in tests. Thread-safe; nothing blocks."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._group = process.Group()
        self._jobs: deque[_Job] = deque()
        self._tried: set[tuple[KernelSpec, str]] = set()
        self._left: dict[str, int] = {}
        self._threads = 0
        self._in_a_row = 0
        self._gave_up = False
        self._shown_s = 0.0
        self._say: Say = print
        self._told: Told = _nothing
        self._state = BackgroundState()

    def start(
        self, arch: Arch, specs: Mapping[KernelSpec, str], say: Say = print, told: Told = _nothing
    ) -> BackgroundState:
        """Compile those of `specs` that are not cached, in order; beside each its part's name. What
        waits from an earlier `start` has the order, and the parts, of this one.

        What was tried before is not tried again until `forget`. `say` gets lines for the console,
        `told`, which must not raise, each part that is ready or was given up, in a thread of this.
        """
        with self._lock:
            self._say, self._told = say, told
            if self._group.ended or self._gave_up:
                return self._state
            missing = [
                _Job(spec, arch, part)
                for spec, part in specs.items()
                if (spec, arch.gfx) not in self._tried and not build.is_cached(spec, arch)
            ]
            self._order(arch, specs)
            if missing:
                self._add(missing)
            return self._state

    def state(self) -> BackgroundState:
        """How far it is."""
        return self._state

    def refusal(self, part: str) -> str:
        """Why `part` has to wait, or will never be ready; empty when it is, or was not asked for.

        Takes no lock.
        """
        state = self._state
        if not self._left.get(part):
            return ""
        if self._gave_up:
            return f"compiling failed: {state.failure}"
        return f"compiling, {state.done} of {state.total} kernels are done"

    def waits(self, part: str) -> bool:
        """Whether `part` will be ready, or given up, later. Takes no lock."""
        return bool(self._left.get(part)) and not self._gave_up

    def forget(self) -> None:
        """Let the next `start` try again what failed. Nothing where one is under way."""
        with self._lock:
            if self._threads:
                return
            build.forget_failures()
            self._tried.clear()
            self._left.clear()
            self._gave_up, self._in_a_row = False, 0
            self._state = BackgroundState()

    def stop(self) -> None:
        """End the compilers that run; called when the process exits."""
        self._group.end()
        with self._lock:
            self._jobs.clear()

    def wait(self, timeout_s: float) -> bool:
        """Until nothing is compiled any more; False where it still is after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while self._state.running and time.monotonic() < end:
            time.sleep(0.01)
        return not self._state.running

    def _order(self, arch: Arch, specs: Mapping[KernelSpec, str]) -> None:
        """Put what waits in the order of `specs`. The lock is held."""
        waiting = {(job.arch.gfx, job.spec): job for job in self._jobs}
        jobs = [
            replace(job, part=part)
            for spec, part in specs.items()
            if (job := waiting.pop((arch.gfx, spec), None)) is not None
        ]
        jobs += waiting.values()
        for job in self._jobs:
            self._left[job.part] -= 1
        for job in jobs:
            self._left[job.part] = self._left.get(job.part, 0) + 1
        self._jobs = deque(jobs)

    def _add(self, jobs: list[_Job]) -> None:
        if not self._threads:
            self._state = BackgroundState()
            self._shown_s = time.monotonic()
            _drop(_log_file())
        self._tried.update((job.spec, job.arch.gfx) for job in jobs)
        self._jobs.extend(jobs)
        for job in jobs:
            self._left[job.part] = self._left.get(job.part, 0) + 1
        total = self._state.total + len(jobs)
        self._state = replace(self._state, running=True, total=total)
        self._tell(f"compiling {len(jobs)} kernels for {jobs[0].arch.gfx} in the background")
        for _ in range(min(_at_a_time(), len(self._jobs)) - self._threads):
            self._threads += 1
            threading.Thread(target=self._work, name="rocm_sd compiling", daemon=True).start()

    def _work(self) -> None:
        self._group.join()
        job = self._next()
        while job is not None:
            self._finish(job, _compiled(job))
            job = self._next()

    def _next(self) -> _Job | None:
        """The next job; None ends the thread."""
        with self._lock:
            if self._jobs and not self._group.ended:
                return self._jobs.popleft()
            self._threads -= 1
            if not self._threads:
                self._end()
            return None

    def _finish(self, job: _Job, failure: CompileError | None) -> None:
        with self._lock:
            if self._group.ended:
                return
            state = replace(self._state, done=self._state.done + 1)
            self._in_a_row = self._in_a_row + 1 if failure else 0
            if failure is not None:
                self._tell(f"{job.spec}: {_short(failure)}")
                path = _log(job, failure)
                first = state.failure or _short(failure)
                state = replace(state, failure=first, log_path=path or state.log_path)
            self._left[job.part] -= 1
            ready = [] if self._left[job.part] else [job.part]
            if self._in_a_row >= FAILURES_BEFORE_GIVING_UP and self._jobs:
                self._gave_up = True
                self._jobs.clear()
                ready += [part for part, left in self._left.items() if left]
            self._state = state
            self._show()
        for part in dict.fromkeys(ready):
            self._told(part)

    def _tell(self, line: str) -> None:
        with suppress(OSError, ValueError):  # no console, or one that is closed
            self._say(line)

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._shown_s >= SHOWN_EVERY_S:
            self._shown_s = now
            self._tell(f"compiled {self._state.done} of {self._state.total} kernels")

    def _end(self) -> None:
        """The last thread's last act."""
        state = self._state = replace(self._state, running=False)
        if self._group.ended:
            return
        where = f"; what the compilers said is in {state.log_path}" if state.log_path else ""
        if self._gave_up:
            self._tell(f"no more kernels are compiled, too many failed{where}")
        elif state.failure:
            self._tell(f"not every kernel could be compiled{where}")
        else:
            self._tell(f"all {state.total} kernels are compiled")
        if cache.unwritten():
            self._tell(f"the next start compiles them again: {cache.unwritten()}")


def _at_a_time() -> int:
    """A core is left to the rest."""
    return max(1, min((os.cpu_count() or 1) - 1, MOST_AT_A_TIME))


def _compiled(job: _Job) -> CompileError | None:
    try:
        build.build(job.spec, job.arch)
    except CompileError as error:
        return error
    except (RuntimeError, OSError, ValueError, MemoryError) as error:
        return CompileError("build", f"{type(error).__name__}: {error}")
    return None


def _short(failure: CompileError) -> str:
    line = " ".join(str(failure).split())
    return line if len(line) <= REASON_CHARACTERS else f"{line[:REASON_CHARACTERS]}..."


def _log_file() -> Path | None:
    folder = cache.directory()
    return None if folder is None else folder / "compile.log"


def _drop(path: Path | None) -> None:
    if path is not None:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _log(job: _Job, failure: CompileError) -> str:
    """Append the whole failure to the log; the file's path, empty where it cannot be written."""
    path = _log_file()
    if path is None:
        return ""
    text = f"=== {job.arch.gfx} {job.spec}\n{failure.full()}\n\n"
    try:
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        return ""
    return str(path)


background = Background()
"""The one of the process; the module's functions are its methods."""

start = background.start
state = background.state
refusal = background.refusal
waits = background.waits
forget = background.forget
atexit.register(background.stop)
