"""Has classes tried by children, one after the other, and writes down what became of each.

What a class launches is noted by threads (recorder.py), some classes before it is launched, and
also while somebody needs the card: it takes the CPU longer than a child takes to launch it. A child
is a process of its own (child.py): one tries what needs no torch, another, which takes long to
start, the rest. Where it dies, or does not come back in time, that is the verdict of the class
in work. After a fault or a hang nothing more is tried on the card by itself: `halt` says so and
why, until driver, torch or kernels change or somebody asks.
"""

from __future__ import annotations

import math
import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lib_rocm_sd.engine.selftest import FAILURES, describe
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.runtime import process
from lib_rocm_sd.trials import recorder, recording, torch_child, verdicts
from lib_rocm_sd.trials.link import Link
from lib_rocm_sd.trials.place import Place
from lib_rocm_sd.trials.subject import Subject, digest
from lib_rocm_sd.trials.verdicts import (
    DANGEROUS,
    FAULTED,
    HUNG,
    KILLED,
    REFUSED,
    Verdict,
)

CLASS_LIMIT_S = 20.0
START_LIMIT_S = 60.0
BUSY_POLL_S = 0.25
QUIET_S = 0.5
"""A pause is one after this long: between the pictures of a series there are shorter ones, in which
a child could only be started and ended.
"""
PATIENCE_S = 2.0
"""After this long without a pause a turn is asked for: who makes picture after picture would else
never have ours.
"""
TURN_S = 3.0
"""In a turn no class is begun after this; somebody waits for their picture."""
MOST_NOTING = 4
"""Threads that note what classes launch; each takes up to 150 MiB meanwhile, mostly float64."""
AHEAD_BYTES = 512 << 20
"""No class is begun to be noted while more waits for a child. While pictures are made a child has
the card for a few seconds at a time, and noting, which takes longer, is to fill the time between.
"""
PLENTY_BYTES = 6 << 30
"""With so much free a child stays while somebody needs the card: it holds some 500 MiB idle, and
to start another took half of each turn.
"""
_LAST_WORDS = re.compile(rf"{verdicts.FAULT_WORDS}|segmentation|exception|abort", re.I)
_WINDOWS_EXCEPTION = 0xC0000000
_OUT_OF_MEMORY_KILLER = "ended from outside (SIGKILL), maybe because memory was short"

Told = Callable[[Subject, Verdict], None]


Turn = Callable[[], AbstractContextManager[Any]]


class Turns:
    """Turns of one thread. `busy()`: somebody needs the card now. `turn()`: a context entered when
    the thread's turn comes; nobody needs the card until it is left. None: the thread waits for
    pauses.
    """

    def __init__(self, busy: Callable[[], bool], turn: Turn | None = None) -> None:
        self._busy, self._turn = busy, turn
        self._held = ExitStack()
        self._ends_s = 0.0
        self._needed_s = -math.inf

    def come(self, given_up: Callable[[], bool], meanwhile: Callable[[], None]) -> bool:
        """Wait until a class may be begun; False where it was given up. `meanwhile()` is called
        while somebody needs the card.
        """
        if self._ends_s > time.monotonic():
            return not given_up()
        self.leave()
        begun_s = time.monotonic()
        while not given_up() and self._is_needed():
            meanwhile()
            if self._turn is not None and time.monotonic() - begun_s >= PATIENCE_S:
                self._held.enter_context(self._turn())
                self._ends_s = time.monotonic() + TURN_S
                break
            time.sleep(BUSY_POLL_S)
        return not given_up()

    def _is_needed(self) -> bool:
        """Now, or a moment ago."""
        now_s = time.monotonic()
        if self._busy():
            self._needed_s = now_s
        return now_s - self._needed_s < QUIET_S

    def leave(self) -> None:
        """Let others go on, if they wait."""
        self._ends_s = 0.0
        self._held.close()


@dataclass(frozen=True)
class _Letter:
    """What the child is sent of one class; `torch`: the child that takes it must have torch.
    `is_far`: a problem of it wants so much memory that no other child may be there.
    """

    key: str
    head: dict[str, Any]
    blobs: list[bytes]
    torch: bool
    is_far: bool
    deaths: int


def _size(noted: Verdict | _Letter) -> int:
    """Bytes that it takes while it waits for a child."""
    return sum(map(len, noted.blobs)) if isinstance(noted, _Letter) else 0


class _Ahead:
    """`note` of each class, in order, by threads that are in this thread's group of processes."""

    def __init__(
        self, subjects: Sequence[Subject], note: Callable[[Subject], Verdict | _Letter]
    ) -> None:
        self._note, self._group = note, process.group()
        self._noted: deque[Future[Verdict | _Letter]] = deque(Future() for _ in subjects)
        self._todo = deque(zip(subjects, self._noted, strict=True))
        self._changed = threading.Condition()
        self._waiting_bytes = 0
        self._threads: list[threading.Thread] = []
        for _ in range(min(MOST_NOTING, max(1, (os.cpu_count() or 1) - 1), len(subjects))):
            thread = threading.Thread(target=self._work, name="rocm_sd noting", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the process has too many
                if not self._threads:
                    raise
                break
            self._threads.append(thread)

    def next(
        self, given_up: Callable[[], bool], late: Callable[[], None]
    ) -> Verdict | _Letter | None:
        """What was noted of the next class; None where it is given up. `late` is called where
        nothing is noted yet.
        """
        future = self._noted.popleft()
        if not future.done():
            late()
        while not (future.done() or given_up()):
            wait((future,), BUSY_POLL_S)
        if not future.done():
            return None
        result = future.result()
        with self._changed:
            self._waiting_bytes -= _size(result)
            self._changed.notify_all()
        return result

    def close(self) -> None:
        """Note nothing more: threads must not be within torch when Python ends."""
        with self._changed:
            self._todo.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        if self._group is not None:
            self._group.join()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._todo or self._waiting_bytes < AHEAD_BYTES)
                if not self._todo:
                    return
                subject, future = self._todo.popleft()
            try:
                result = self._note(subject)
            except BaseException as error:
                future.set_exception(error)
                continue
            with self._changed:
                self._waiting_bytes += _size(result)
            future.set_result(result)


def halt(place: Place) -> str:
    """Why nothing more is tried on this card by itself; empty where it is."""
    verdict = verdicts.read(place.halt_key)
    return "" if verdict is None else verdict.reason


def resume(place: Place) -> None:
    """Let classes be tried by themselves again: the user has asked for it."""
    verdicts.forget(place.halt_key)


class Conductor:
    """Runs the trials on one card. One thread at a time may call `run`.

    `busy()`: the card is needed now, so no class is begun. `turn()`: see `Turns`. `stop()`: nobody
    waits any more. `free()`: bytes of device memory that nobody uses. `spawn` starts a child; for
    tests.
    """

    def __init__(
        self,
        place: Place,
        busy: Callable[[], bool] = bool,
        stop: Callable[[], bool] = bool,
        turn: Turn | None = None,
        free: Callable[[], int] = int,
        spawn: Callable[[], Link] = Link,
        class_limit_s: float = CLASS_LIMIT_S,
        start_limit_s: float = START_LIMIT_S,
    ) -> None:
        self.place = place
        self._turns = Turns(busy, turn)
        self._stop, self._free, self._spawn = stop, free, spawn
        self._class_limit_s, self._start_limit_s = class_limit_s, start_limit_s
        self._children: dict[bool, Link] = {}
        """By whether they have torch."""
        self._spares: dict[bool, Link] = {}
        """That have not opened the card."""
        self._in_work = False
        """Which of them has the class."""
        self._without_torch = ""
        """Why there is no child with torch."""
        self._abandoned = ""
        self._cancelled = False

    def cancel(self) -> None:
        """Have `run` come to an end, from another thread: the class in work gets no verdict."""
        self._cancelled = True
        for child in (*self._children.values(), *self._spares.values()):
            child.kill()

    def run(
        self,
        subjects: Iterable[Subject],
        *,
        force: bool = False,
        told: Told = lambda subject, verdict: None,
        limit_s: float = math.inf,
        keep: Callable[[], bool] = bool,
    ) -> list[tuple[Subject, Verdict]]:
        """Try those that have no verdict; with `force` all, and each also after a fault of another.

        `told` gets each class with its verdict, also those known before. `limit_s`: classes that
        are not begun by then are left. `keep()` at the end: children stay until `rest`. What could
        not be tried for a reason that passes (no memory, no child) has the verdict "refused", which
        is not kept.
        """
        results: list[tuple[Subject, Verdict]] = []
        pending, given_up = list(subjects), partial(self._given_up, time.monotonic() + limit_s)
        ahead = _Ahead(pending, partial(self._noted, force))
        try:
            for subject in pending:
                outcome = ahead.next(given_up, self._turns.leave)
                if isinstance(outcome, _Letter):
                    outcome = self._verdict(subject, outcome, force, given_up)
                if outcome is None:
                    break
                results.append((subject, outcome))
                told(subject, outcome)
        finally:
            if not keep() or self._cancelled:
                self.rest()
            self._turns.leave()
            ahead.close()
        return results

    @property
    def has_children(self) -> bool:
        """A `run` has kept some."""
        return bool(self._children)

    def rest(self) -> None:
        """End the children that a `run` has kept."""
        for children in (self._children, self._spares):
            while children:
                children.popitem()[1].end()

    def _make_way(self, with_torch: bool) -> None:
        """Somebody needs the card: children, which hold memory of it, end unless there is plenty.
        One that has not opened it yet waits to take the place of the one that is needed next.
        """
        if self._children and self._free() < PLENTY_BYTES:
            while self._children:
                self._children.popitem()[1].end()
        if with_torch not in self._children and with_torch not in self._spares:
            with suppress(OSError):  # which `_opened` says
                self._spares[with_torch] = self._spawned(with_torch)

    def _noted(self, force: bool, subject: Subject) -> Verdict | _Letter:
        """The verdict of one class where nothing is to be tried, else what is sent to a child."""
        try:
            codes = subject.codes(self.place.arch)
        except CompileError as error:
            return self._made(subject, REFUSED, f"does not compile: {error.reason}")
        key = subject.key(self.place, {spec: digest(code) for spec, code in codes.items()})
        verdict = verdicts.read(key)
        if verdict is not None and not verdict.asks_again and not force:
            return verdict
        why = self._against(force)
        if why:
            return self._made(subject, REFUSED, why)
        try:
            return self._letter(subject, key, codes, verdict.deaths if verdict else 0)
        except (*FAILURES, MemoryError) as error:
            return self._made(subject, REFUSED, f"its launches cannot be noted: {describe(error)}")

    def _against(self, force: bool) -> str:
        return self._abandoned or ("" if force else halt(self.place))

    def _verdict(
        self, subject: Subject, letter: _Letter, force: bool, given_up: Callable[[], bool]
    ) -> Verdict | None:
        """The verdict of one class that a child makes; None where nothing more is to be done."""
        why = self._against(force)
        if why:
            return self._made(subject, REFUSED, why)
        if not self._turns.come(given_up, partial(self._make_way, letter.torch)):
            return None
        return self._tried(subject, letter)

    def _given_up(self, end: float) -> bool:
        return self._stop() or self._cancelled or time.monotonic() > end

    def _letter(self, subject: Subject, key: str, codes: dict[Any, bytes], deaths: int) -> _Letter:
        s = subject
        head: dict[str, Any] = {"kind": "class"}
        rows: list[dict[str, Any]] = []
        blobs: list[bytes] = []
        is_far = False
        try:
            recordings = recorder.recordings(s.op, s.variant, s.config, s.problem)
            rows, blobs = recording.packed(recordings)
            with_torch, is_far = False, any(each.far for each in recordings)
        except recorder.NeedsTorchError:
            problems = dict.fromkeys((*s.op.test_problems(s.problem), *_longer(s)))
            head["torch"] = torch_child.description(s.op, s.variant, s.config, list(problems))
            with_torch = True
        first = len(blobs)
        places = [
            [[spec.source, spec.entry, [list(pair) for pair in spec.defines]], first + place]
            for place, spec in enumerate(codes)
        ]
        head |= {"rows": rows, "codes": places}
        return _Letter(key, head, [*blobs, *codes.values()], with_torch, is_far, deaths)

    def _tried(self, subject: Subject, letter: _Letter) -> Verdict:
        was_there = letter.torch in self._children
        other = self._children.pop(not letter.torch, None) if letter.is_far else None
        if other is not None:
            other.end()
        try:
            child = self._opened(letter.torch)
        except TimeoutError:
            verdict = self._made(subject, HUNG, "the driver did not answer in a process of its own")
            return self._kept(letter.key, verdict)
        except (OSError, RuntimeError) as error:
            return self._made(subject, REFUSED, f"no process for the trial: {describe(error)}")
        child.send(letter.head, letter.blobs)
        problem, end = "", time.monotonic() + self._class_limit_s
        while True:
            try:
                answer = child.receive(end - time.monotonic())
            except TimeoutError:
                return self._kept(letter.key, self._hung(subject, problem))
            if answer is None and was_there and not problem and not self._cancelled:
                self._ended()  # it had died before, of something else
                return self._tried(subject, letter)
            if answer is None:
                return self._died(subject, letter.key, problem)
            if answer.get("kind") == "trying":
                problem = str(answer.get("problem"))
            elif answer.get("kind") == "verdict":
                return self._answered(subject, letter, answer, problem)

    def _answered(
        self, subject: Subject, letter: _Letter, answer: dict[str, Any], problem: str
    ) -> Verdict:
        reason = str(answer.get("reason", ""))
        if answer["outcome"] == FAULTED:  # the child can do nothing more on the card
            reason = f"{problem}: {reason}"
            self.rest()
        verdict = replace(
            self._made(subject, answer["outcome"], reason),
            error=answer.get("error"),
            tolerance=float(answer.get("tolerance", 0.0)),
            time_ms=round(float(answer.get("time_ms", 0.0)), 3),
            notes=tuple(str(note) for note in answer.get("notes", ())),
            deaths=letter.deaths,
        )
        return self._kept(letter.key, verdict) if answer.get("lasting", True) else verdict

    def _hung(self, subject: Subject, problem: str) -> Verdict:
        reason = f"{problem}: no answer within {self._class_limit_s:g} s"
        self._end_hanging()
        if self._abandoned:
            reason += ", and its process cannot be ended"
        return self._made(subject, HUNG, reason)

    def _end_hanging(self) -> None:
        child = self._children.pop(self._in_work, None)
        if child is not None and child.kill():
            child.end()
        elif child is not None:
            self._abandoned = "a process hangs in the driver and cannot be ended"
        self.rest()

    def _died(self, subject: Subject, key: str, problem: str) -> Verdict:
        """The verdict where the process ended in the middle."""
        outcome, reason = self._ended()
        if self._cancelled:
            return self._made(subject, REFUSED, "its trial was not finished")
        reason = f"{problem}: {reason}" if problem else reason
        if outcome == KILLED:
            return verdicts.interrupted(key, str(subject), str(self.place), reason, KILLED)
        verdict = self._made(subject, outcome, reason)
        return verdict if outcome == REFUSED else self._kept(key, verdict)

    def _kept(self, key: str, verdict: Verdict) -> Verdict:
        verdict = verdicts.write(key, verdict)
        if verdict.outcome in DANGEROUS:
            why = (
                f"a test {verdict.outcome} ({verdict.subject}), so we stopped testing kernels on "
                'this card. Press "Check this card" to continue'
            )
            stopped = Verdict("halt", REFUSED, why, device=str(self.place))
            verdicts.write(self.place.halt_key, stopped)
        return verdict

    def _made(self, subject: Subject, outcome: str, reason: str) -> Verdict:
        return Verdict(str(subject), outcome, verdicts.clean(reason), device=str(self.place))

    def _opened(self, with_torch: bool) -> Link:
        """The child, started if need be. Raises OSError, RuntimeError and TimeoutError."""
        self._in_work = with_torch
        if with_torch in self._children:
            return self._children[with_torch]
        if with_torch and self._without_torch:
            raise RuntimeError(self._without_torch)
        spare = self._spares.pop(with_torch, None)
        child = self._children[with_torch] = spare or self._spawned(with_torch)
        if self._cancelled:
            child.kill()
        child.send({"kind": "open", **self.place.as_dict(), "torch": with_torch})
        try:
            answer = child.receive(self._start_limit_s)
        except TimeoutError:
            self._end_hanging()
            raise
        if answer is None or answer.get("kind") != "ready":
            _, why = self._ended()
            if answer is None and spare is not None:  # it may have died before
                return self._opened(with_torch)
            reason = str(answer["reason"]) if answer else f"it {why}"
            self._without_torch = reason if answer and with_torch else ""
            raise RuntimeError(reason)
        return child

    def _spawned(self, with_torch: bool) -> Link:
        """A child that loads what it needs, and has not opened the card. Raises OSError."""
        child = self._spawn()
        if with_torch:
            child.send({"kind": "load", "libraries": self.place.before_torch})
        return child

    def _ended(self) -> tuple[str, str]:
        """Outcome and reason of the child, which has ended by itself. A fault may have left the
        card in a state that another would be blamed for.
        """
        child = self._children.pop(self._in_work)
        ending = ended(child.status(), child.words())
        child.end()
        if ending[0] in DANGEROUS:
            self.rest()
        return ending


def _longer(subject: Subject) -> Sequence[Any]:
    """The real problem, where a kernel is launched for it that no test problem launches, with as
    few queries as there can be.
    """
    s, longest = subject, getattr(subject.problem, "seq_k", 0)
    if longest <= 256:
        return ()
    return (replace(s.problem, batch=1, heads=1, seq_q=3),)


def ended(status: int | None, words: str) -> tuple[str, str]:
    """Outcome and reason, by how a child ended and what it wrote to standard error."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    last_words = next((line for line in lines if _LAST_WORDS.search(line)), "")
    if status is None:
        return HUNG, "its process does not end"
    if status < 0:
        name = str(-status)
        with suppress(ValueError):
            name = signal.Signals(-status).name
        if name == "SIGKILL" and not last_words:
            return KILLED, _OUT_OF_MEMORY_KILLER
        last = f": {lines[-1]}" if lines and not last_words else ""
        return FAULTED, f"{last_words or 'its process crashed'} ({name}){last}"
    if status & 0xFFFFFFFF >= _WINDOWS_EXCEPTION:
        return FAULTED, f"{last_words or 'its process crashed'} (0x{status & 0xFFFFFFFF:08X})"
    return REFUSED, f"ended with status {status}: {lines[-1] if lines else 'no word'}"
