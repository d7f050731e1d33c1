"""The engine's gate: a class is launched in this process only after a trial in a child.

    gate = Gate(renew=engine.renew, say=host.say, busy=host.is_making_a_picture)
    gate.start()          # reads the journal of processes that died
    engine.gate = gate

From then on the engine asks for each class that a plan would use. One without a verdict is refused
("is being tried ..."), queued, and tried in the background; `renew` is then called in the gate's
thread, which may wait for the end of a picture before it calls `engine.renew`. `state()` says how
far it is, `ask()` tries again what was refused. With all verdicts there nothing is started.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lib_rocm_sd import console
from lib_rocm_sd import device as devices
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.engine import memory
from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.engine.gating import Asked, Refusal
from lib_rocm_sd.engine.selftest import describe
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.ops.base import KernelSpec, Launch
from lib_rocm_sd.runtime import process
from lib_rocm_sd.trials import place as places
from lib_rocm_sd.trials import verdicts, zluda
from lib_rocm_sd.trials.conductor import Conductor, Turn, halt, resume
from lib_rocm_sd.trials.journal import Journal
from lib_rocm_sd.trials.place import Place
from lib_rocm_sd.trials.subject import Subject, Subjects
from lib_rocm_sd.trials.verdicts import FAULTED, Verdict

STOPPED_S = 15.0
KEPT_S, POLL_S = 10.0, 0.25
"""How long children that somebody waited for are kept for the next class."""
WAITS = "is being tried in a process of its own first"

devices.judge_zluda = zluda.judge
"""A program that has trials has ZLUDA tested, too."""

Say = Callable[[str], None]
Places = Callable[[torch.device, Launch | None], Place | None]
Identity = tuple[Any, ...]


@dataclass(frozen=True)
class GateState:
    """`done` of `total` classes were tried; `subject` is the one in work, empty if none. `left_s`:
    how long the others will take, by what these have taken; 0 where nothing can be said yet.

    `refused`: classes that must not be launched, in words, with the reason of each. `halted`: why
    nothing more is tried by itself, empty where it is.
    """

    running: bool = False
    done: int = 0
    total: int = 0
    subject: str = ""
    left_s: float = 0.0
    refused: tuple[tuple[str, str], ...] = ()
    halted: str = ""


@dataclass(frozen=True)
class Known:
    """A class on a card. `key`: of its verdict; empty where it does not compile yet."""

    subject: Subject
    place: Place
    key: str
    refusal: Refusal | None

    @property
    def waits(self) -> bool:
        """It is still to be tried."""
        return self.refusal is not None and self.refusal.waits

    @property
    def barred(self) -> str:
        """Why it must not be launched; empty where it may be, and where it is still to be tried."""
        return "" if self.refusal is None or self.refusal.waits else self.refusal.reason


Wanted = tuple[Place, Subject, bool]
"""A class to be tried on a card; True: also after a fault of another."""


class Gate:
    """One per process; others exist in tests. Thread-safe; the engine's questions wait for nothing.

    `renew()`: called, in the gate's thread and without a lock, when answers have changed. `say`:
    lines for the console. `busy()`: a picture is being made, and no trial is begun. `turn()`: where
    that never ends, see `conductor.Turns`. `place_of` and `conductor` are for tests.
    """

    def __init__(
        self,
        renew: Callable[[], None],
        say: Say = print,
        busy: Callable[[], bool] = bool,
        turn: Turn | None = None,
        journal: Journal | None = None,
        place_of: Places = places.of,
        conductor: Callable[..., Conductor] = Conductor,
    ) -> None:
        self._renew, self._say = renew, say
        self._busy, self._turn = busy, turn
        self._journal = journal or Journal()
        self._place_of, self._conductor = place_of, conductor
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._places: dict[torch.device, Place | None] = {}
        self._known: dict[tuple[Place, Identity], Known] = {}
        self._digests: dict[tuple[KernelSpec, str], str] = {}
        self._subjects = Subjects()
        self._queue: list[Wanted] = []
        self._batch: list[Wanted] = []
        """What a conductor has of it; the first is in work."""
        self._recalled = False
        """The conductor is to give back what it has not begun."""
        self._ranks: dict[Identity, int] = {}
        self._launched: set[tuple[Place, Identity, str]] = set()
        self._state = GateState()
        self._begun_s = 0.0
        self._thread: threading.Thread | None = None
        self._works = False
        """The thread looks into the queue once more."""
        self._conductors: dict[Place, Conductor] = {}
        self._waiting = 0
        """Who waits for the end of what is tried."""
        self._group = process.Group()

    # -- for the host

    def start(self) -> list[Verdict]:
        """Read what processes that died have left in the journal; what that bars, once."""
        atexit.register(self.stop)
        interruptions = [verdicts.of_line(line) for line in self._journal.open_lines()]
        for verdict in interruptions:
            self._tell(f"{verdict.subject}: {verdict.reason}")
        return interruptions

    def stop(self) -> None:
        """Begin nothing more, end the child and wait for the thread, which must not be within torch
        when Python ends. Called then.
        """
        self._group.end()
        with self._lock:
            running, thread = list(self._conductors.values()), self._thread
            self._changed.notify_all()
        for each in running:
            each.cancel()
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOPPED_S)

    def state(self) -> GateState:
        """How far it is. Takes no lock."""
        return self._state

    def expect(
        self,
        device: torch.device,
        launch: Launch | None,
        classes: Callable[[Arch], Iterable[Subject]] = lambda arch: (),
    ) -> Callable[[], int]:
        """Have tried what will be asked for, where that is not known yet, in this order. The
        function that is given says how many of these classes still wait.
        """
        place = self._place(device, launch)
        if place is None:
            return int
        listed = list(classes(place.arch))
        with self._lock:
            self._show(halted=halt(place))
            for subject in listed:
                self._answer(place, subject)
            self._recall()
        keys = [(place, subject.identity) for subject in listed]
        return lambda: sum(self._known[key].waits for key in keys if key in self._known)

    def order(self, classes: Iterable[Subject]) -> None:
        """From now on have these tried before others that wait, in this order."""
        ranks: dict[Identity, int] = {}
        for subject in classes:
            ranks.setdefault(subject.identity, len(ranks))
        with self._lock:
            self._ranks = ranks
            self._recall()

    def serves(self, device: torch.device) -> bool:
        """Whether what was expected on `device` is tried; not where no driver launches it."""
        return self._places.get(device) is not None

    def forget(self) -> None:
        """Look for every verdict anew: kernels are compiled again."""
        with self._lock:
            self._known.clear()
            self._digests.clear()
            self._launched.clear()
            self._show(refused=(), halted="")

    def ask(self) -> int:
        """The user wants what was refused to be tried again, class by class; how many there are."""
        with self._lock:
            again = [known for known in self._known.values() if known.barred]
            for place in {known.place for known in again}:
                resume(place)
            self._show(halted="")
            for known in again:
                self._enqueue(known.place, known.subject, force=True)
            return len(again)

    def wait(self, timeout_s: float) -> bool:
        """Until nothing is tried any more; False where something still is. Who waits does so for
        class after class: then children are kept for a while. So they are where more is queued.
        """
        with self._changed:
            self._waiting += 1
            try:
                return self._changed.wait_for(lambda: not self._state.running, timeout_s)
            finally:
                self._waiting -= 1

    # -- for the engine

    def refusal(self, asked: Asked) -> Refusal | None:
        place = self._place(asked.device, asked.launch)
        if place is None:
            return None
        subject = self._subjects.of(asked, place)
        with self._lock:
            return self._answer(place, subject).refusal

    def vouches(self, asked: Asked) -> bool:
        place = self._place(asked.device, asked.launch)
        return place is not None and self.refusal(asked) is None

    def launching(self, asked: Asked, stage: str) -> AbstractContextManager[None] | None:
        known = self._verdict_of(asked)
        if known is None:
            return None
        once = (known.place, known.subject.identity, stage)
        return None if once in self._launched else self._trying(known, once)

    def failed(self, asked: Asked, reason: str) -> None:
        """After a fault the class has its verdict; what else fails is the process's own affair."""
        known = self._verdict_of(asked) if verdicts.names_fault(reason) else None
        if known is not None and known.refusal is None:
            message = f"in the program itself, though not in its trial: {reason}"
            made = Verdict(str(known.subject), FAULTED, message, device=str(known.place))
            verdict = verdicts.write(known.key, made)
            with self._lock:
                self._note(replace(known, refusal=Refusal(verdict.refusal)))
            self._tell(f"{known.subject}: {verdict.reason}")

    # -- within

    def _verdict_of(self, asked: Asked) -> Known | None:
        """What is known of a class that was compiled."""
        place = self._place(asked.device, asked.launch)
        if place is None:
            return None
        known = self._known.get((place, self._subjects.of(asked, place).identity))
        return known if known is not None and known.key else None

    def _place(self, device: torch.device, launch: Launch | None) -> Place | None:
        if device not in self._places:
            place = self._place_of(device, launch)
            if place is None and launch is None:  # nothing may be launched there yet
                return None
            self._places[device] = place
        return self._places[device]

    def _answer(self, place: Place, subject: Subject) -> Known:
        """The lock is held."""
        known = self._known.get((place, subject.identity))
        if known is None:
            known = self._looked_up(place, subject)
            self._note(known)
        return known

    def _looked_up(self, place: Place, subject: Subject) -> Known:
        """By its verdict; queued where there is none. The lock is held."""
        try:
            key = subject.key(place, subject.digests(place.arch, self._digests))
            verdict = verdicts.read(key)
        except CompileError:
            key, verdict = "", None
        if verdict is not None and not verdict.asks_again:
            refusal = Refusal(verdict.refusal) if verdict.refusal else None
            return Known(subject, place, key, refusal)
        halted = halt(place)
        if halted:
            self._show(halted=halted)
            return Known(subject, place, key, Refusal(halted))
        self._enqueue(place, subject, force=False)
        before = f" ({verdict.reason})" if verdict else ""
        return Known(subject, place, key, Refusal(f"{WAITS}{before}", waits=True))

    def _enqueue(self, place: Place, subject: Subject, force: bool) -> None:
        """The lock is held."""
        if self._group.ended:
            return
        self._queue.append((place, subject, force))
        if not self._state.running:
            self._begun_s = time.monotonic()
            self._show(running=True, done=0, total=0, left_s=0.0)
            self._tell("trying new kernels in a process of their own, once")
        self._show(total=self._state.total + 1)
        self._changed.notify_all()
        if self._works:
            return
        thread = threading.Thread(target=self._work, name="rocm_sd trials", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the process ends, or has too many threads
            self._tell(f"no kernel can be tried: {error}")
            self._queue.clear()
            self._rests()
        else:
            self._works, self._thread = True, thread

    def _in_order(self, waiting: list[Wanted]) -> list[Wanted]:
        """First what the user has asked for. The lock is held."""
        last = len(self._ranks)
        return sorted(waiting, key=lambda w: (not w[2], self._ranks.get(w[1].identity, last)))

    def _recall(self) -> None:
        """Have the order looked at where it is another now. The lock is held."""
        waiting = [*self._batch[1:], *self._queue]
        if self._batch and self._in_order(waiting) != waiting:
            self._recalled = True

    def _work(self) -> None:
        self._group.join()
        try:
            while not self._is_done():
                while batch := self._next():
                    self._run(batch)
                self._linger()
                if not self._queue:
                    self._end_children()
        except BaseException:
            with self._lock:
                self._works = False
                self._rests()
            raise

    def _is_done(self) -> bool:
        with self._lock:
            if self._queue and not self._group.ended:
                return False
            self._queue.clear()
            self._rests()
            self._works = False
            return True

    def _end_children(self) -> None:
        for each in list(self._conductors.values()):
            each.rest()
        with self._lock:
            self._conductors.clear()  # with why there was no child: the owner may ask again

    def _linger(self) -> None:
        """Where children are kept, wait a while for more, unless somebody needs the card."""
        has_children = any(each.has_children for each in self._conductors.values())
        end_s = time.monotonic() + KEPT_S * has_children

        def more() -> bool:
            return bool(self._queue) or self._group.ended

        with suppress(Exception):  # of the host, which a trial tells of
            while time.monotonic() < end_s and not self._busy():
                with self._changed:
                    if self._changed.wait_for(more, POLL_S):
                        return

    def _run(self, batch: list[Wanted]) -> None:
        (place, _, force), *_ = batch
        subjects = [subject for _, subject, _ in batch]
        finished: set[Identity] = set()

        def told(subject: Subject, verdict: Verdict) -> None:
            finished.add(subject.identity)
            with self._lock:
                self._batch = [each for each in self._batch if each[1].identity not in finished]
            self._done(place, subject, verdict)

        def stop() -> bool:
            return self._group.ended or self._recalled

        how = {
            "busy": self._busy,
            "turn": self._turn,
            "stop": stop,
            "free": partial(_free_bytes, place),
        }
        with self._lock:
            if place not in self._conductors:
                self._conductors[place] = self._conductor(place, **how)
        for other, each in list(self._conductors.items()):
            if other != place:  # its child would hold memory of a card of another kind, idly
                each.rest()
        try:
            self._conductors[place].run(
                subjects,
                force=force,
                told=told,
                keep=lambda: self._waiting > 0 or bool(self._queue) or self._recalled,
            )
        except Exception as error:  # of the host too, which is asked there
            self._tell(f"the trials ended: {describe(error)}")
        with self._lock:
            rest, self._batch = self._batch, []
            if self._recalled:
                self._queue, rest = rest + self._queue, []
                self._recalled = False
        for _, subject, _ in rest:
            self._done(place, subject, None)

    def _next(self) -> list[Wanted]:
        """What goes to one conductor; nothing where all is tried."""
        with self._lock:
            if self._queue and not self._group.ended:
                queue = self._in_order(self._queue)
                place, first, force = queue[0]
                batch = [item for item in queue if (item[0], item[2]) == (place, force)]
                self._queue = [item for item in queue if item not in batch]
                self._batch = list(batch)
                self._show(subject=str(first))
                return batch
            if not self._group.ended:
                message = f"all new kernels are tried, {len(self._state.refused)} are not used"
                self._tell(self._state.halted or message)
            self._rests()
            return []

    def _rests(self) -> None:
        """Nothing is tried. The lock is held."""
        self._show(running=False, subject="")
        self._changed.notify_all()

    def _done(self, place: Place, subject: Subject, verdict: Verdict | None) -> None:
        """A class has its verdict, or none can be had in this process."""
        with self._lock:
            known = self._known.get((place, subject.identity))
            halted = halt(place)
            reason = "its trial was not run" if verdict is None else verdict.refusal
            if verdict is not None and halted == verdict.reason:
                reason = halted
            key = known.key if known else ""
            if verdict is not None and verdict.passed and not key:
                with suppress(CompileError):
                    key = subject.key(place, subject.digests(place.arch, self._digests))
            refusal = Refusal(reason) if reason else None
            if reason not in ("", halted):
                self._tell(f"{subject}: {reason}")
            self._note(Known(subject, place, key, refusal))
            count = self._state.done + 1
            left_s = console.left_s(self._begun_s, count, self._state.total)
            self._show(done=count, halted=halted, left_s=left_s)
        try:
            self._renew()
        except Exception as error:  # of the host
            self._tell(f"the host cannot be told of {subject}: {describe(error)}")

    def _note(self, known: Known) -> None:
        """The lock is held."""
        self._known[known.place, known.subject.identity] = known
        every = ((str(each.subject), each.barred) for each in self._known.values())
        self._show(refused=tuple((name, why) for name, why in every if why))

    def _show(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)

    @contextmanager
    def _trying(self, known: Known, once: tuple[Place, Identity, str]) -> Iterator[None]:
        with self._journal.trying(known.key, str(known.subject), str(known.place)):
            yield
        self._launched.add(once)

    def _tell(self, line: str) -> None:
        with suppress(OSError, ValueError):  # no console, or one that is closed
            self._say(line)


def _free_bytes(place: Place) -> int:
    """Its device memory that no tensor is in; none where torch cannot tell."""
    if torch.cuda.is_available():
        with suppress(RuntimeError), memory.recording:
            return memory.free_bytes(torch.device("cuda", place.index))
    return 0


def put_before(engine: Engine, say: Say, busy: Callable[[], bool] = bool) -> Gate:
    """A gate of a program that needs nothing beside it: `engine` launches only what was tried."""
    gate = Gate(renew=engine.renew, say=say, busy=busy)
    gate.start()
    engine.gate = gate
    return gate
