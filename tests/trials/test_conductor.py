"""Whatever becomes of a child, this process lives, and the verdict says what it was."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import build
from lib_rocm_sd.trials import conductor, recorder, subject, verdicts
from lib_rocm_sd.trials.conductor import Conductor, Turn, ended
from lib_rocm_sd.trials.link import Link
from lib_rocm_sd.trials.place import Place, launching
from lib_rocm_sd.trials.subject import Subject
from lib_rocm_sd.trials.verdicts import FAULTED, HUNG, KILLED, PASSED, REFUSED, WRONG, Verdict
from tests.clock import Clock
from tests.trials import scaling
from tests.waiting import WAIT_S

pytestmark = pytest.mark.usefixtures("ready")
Script = Callable[[str], None]


@pytest.fixture
def place(hip_file: Path) -> Place:
    return scaling.place(hip_file)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return lambda text: monkeypatch.setenv("ROCM_SD_FAKE_HIP", text)


def run(
    place: Place, *factors: float, force: bool = False, class_limit_s: float = WAIT_S
) -> list[Verdict]:
    subjects = [scaling.subject(factor) for factor in factors]
    made = Conductor(place, class_limit_s=class_limit_s)
    return [verdict for _, verdict in made.run(subjects, force=force)]


def test_what_is_right_passes_and_is_not_tried_again(place: Place) -> None:
    first = run(place, 2.0, 3.0)
    assert [verdict.outcome for verdict in first] == [PASSED, PASSED]
    assert all(0 <= (v.error or 0) <= v.tolerance == 1e-6 and v.time_ms > 0 for v in first)
    assert first[0].subject == "scaling, rocm_sd: Scaling(count=128, factor=2.0, dtype='float32')"
    assert first[0].device == "Fake RX 7900 XTX (gfx1100)"

    def none() -> Link:
        raise AssertionError("a child was started")

    again = Conductor(place, spawn=none).run([scaling.subject(2.0), scaling.subject(3.0)])
    assert [verdict for _, verdict in again] == first


def test_another_packing_of_arguments_asks_anew(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = scaling.subject(2.0).digests(place.arch, {})
    before = scaling.subject(2.0).key(place, digests)
    monkeypatch.setattr(subject, "launching", lambda family: f"another {family}")
    assert scaling.subject(2.0).key(place, digests) != before
    assert launching("conv") != launching("attention")


def test_what_cannot_be_noted_is_refused_for_now(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object) -> None:
        raise ValueError("no such field")

    monkeypatch.setattr(scaling.Scaler, "run", fails)
    (verdict,) = run(place, 2.0)
    assert verdict.outcome == REFUSED
    assert "cannot be noted: ValueError: no such field" in verdict.reason
    assert list(verdicts.every()) == []


def test_another_driver_asks_anew(place: Place, hip_file: Path) -> None:
    each = scaling.subject(2.0)
    digests = each.digests(place.arch, {})
    newer = scaling.place(hip_file, "driver 2")
    assert each.key(place, digests) != each.key(newer, digests)
    assert place.halt_key != newer.halt_key


SCRIPTS = {
    "abort": (FAULTED, "Memory access fault by GPU node-1"),
    "segv": (FAULTED, "SIGSEGV"),
    "fault": (FAULTED, "an illegal memory access was encountered (700)"),
    "kill": (KILLED, "SIGKILL"),
    "refuse": (REFUSED, "too many resources requested for launch (701)"),
    "wrong": (WRONG, "wrong by"),
    "nan": (WRONG, "NaN or infinity"),
    "beyond": (WRONG, "wrote behind its output"),
    "oom": (REFUSED, "out of memory"),
    "exit": (REFUSED, "ended with status 7"),
}


@pytest.mark.parametrize("how", SCRIPTS)
def test_every_end_of_a_child_is_told(place: Place, script: Script, how: str) -> None:
    script(f"{how}:1")
    outcome, said = SCRIPTS[how]
    (verdict,) = run(place, 2.0)
    assert verdict.outcome == outcome
    assert said in verdict.reason
    assert verdict.reason in verdict.refusal
    kept = [each for _, each in verdicts.every() if each.subject != "halt"]
    assert bool(kept) == (how not in ("oom", "exit"))
    assert bool(conductor.halt(place)) == (outcome == FAULTED)


def test_a_hang_is_ended_and_nothing_more_is_tried(place: Place, script: Script) -> None:
    script("hang:1")
    first, second = run(place, 2.0, 3.0, class_limit_s=0.5)
    assert first.outcome == HUNG
    assert "Scaling(count=128" in first.reason
    assert "no answer within 0.5 s" in first.reason
    assert second.outcome == REFUSED
    assert "we stopped testing kernels on this card" in second.reason


def test_the_second_class_dies_and_the_first_keeps_its_verdict(
    place: Place, script: Script
) -> None:
    script(f"abort:{scaling.LAUNCHES + 1}")
    first, second, third = run(place, 2.0, 3.0, 4.0)
    assert [first.outcome, second.outcome, third.outcome] == [PASSED, FAULTED, REFUSED]
    script("right:0")
    again = run(place, 2.0, 3.0, 4.0)
    assert [verdict.outcome for verdict in again] == [PASSED, FAULTED, REFUSED]
    asked = run(place, 2.0, 3.0, 4.0, force=True)
    assert [verdict.outcome for verdict in asked] == [PASSED, PASSED, PASSED]


def test_who_asks_gets_each_class_tried_by_a_new_child(place: Place, script: Script) -> None:
    script("abort:1")
    found = run(place, 2.0, 3.0, force=True)
    assert [verdict.outcome for verdict in found] == [FAULTED, FAULTED]
    assert conductor.halt(place)  # by itself nothing more is tried


def test_a_new_driver_is_not_halted(place: Place, hip_file: Path, script: Script) -> None:
    script("abort:1")
    run(place, 2.0)
    script("right:0")
    (verdict,) = run(scaling.place(hip_file, "driver 2"), 2.0)
    assert verdict.passed


def test_a_killed_child_is_started_once_more(place: Place, script: Script) -> None:
    script("kill:1")
    (first,) = run(place, 2.0)
    assert first.asks_again
    (second,) = run(place, 2.0)
    assert (second.outcome, second.asks_again) == (KILLED, False)
    script("right:0")
    assert run(place, 2.0) == [second]


def test_a_pass_between_deaths_does_not_wipe_them_out(place: Place, script: Script) -> None:
    script("kill:1")
    run(place, 2.0)
    script("right:0")
    (verdict,) = run(place, 2.0)
    assert (verdict.outcome, verdict.deaths) == (PASSED, 1)


def test_a_class_that_does_not_compile_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(spec: object, row: object) -> build.CodeObject:
        raise CompileError("clang", "no such thing")

    monkeypatch.setattr(build, "build", fails)
    (verdict,) = run(place, 2.0)
    assert (verdict.outcome, verdict.reason) == (REFUSED, "does not compile: no such thing")
    assert list(verdicts.every()) == []


def test_without_a_runtime_it_is_refused_for_now(tmp_path: Path) -> None:
    (verdict,) = run(scaling.place(tmp_path / "none.so"), 2.0)
    assert verdict.outcome == REFUSED
    assert "no process for the trial" in verdict.reason
    assert list(verdicts.every()) == []


@pytest.mark.parametrize(
    ("command", "outcome", "said"),
    [
        (["no such program"], REFUSED, "no process for the trial"),
        ([sys.executable, "-c", "import time; time.sleep(60)"], HUNG, "the driver did not answer"),
        ([sys.executable, "-c", "print('no json'); raise SystemExit(3)"], REFUSED, "status 3"),
    ],
)
def test_a_child_that_does_not_begin(
    place: Place, command: Sequence[str], outcome: str, said: str
) -> None:
    made = Conductor(place, spawn=lambda: Link(command), start_limit_s=1.0)
    ((_, verdict),) = made.run([scaling.subject(2.0)])
    assert verdict.outcome == outcome
    assert said in verdict.reason


def test_nothing_is_begun_while_the_card_is_needed(place: Place) -> None:
    answers = [True, True, False]
    made = Conductor(place, busy=lambda: answers.pop(0) if answers else False)
    ((_, verdict),) = made.run([scaling.subject(2.0)])
    assert verdict.passed
    assert answers == []
    assert Conductor(place, busy=lambda: True).run([scaling.subject(5.0)], limit_s=0.0) == []
    assert Conductor(place, stop=lambda: True).run([scaling.subject(5.0)]) == []


class Watch:
    """The `time` of conductor.py: asleep, its own time passes."""

    def __init__(self) -> None:
        self.monotonic = Clock()
        self.sleep = self.monotonic.turn


def test_the_moment_between_two_pictures_is_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, ended = Watch(), []
    busy = [True, False, True, False]  # a series; then nobody
    monkeypatch.setattr(conductor, "time", watch)
    needed = conductor.Turns(lambda: busy.pop(0) if busy else False)
    assert needed.come(bool, lambda: ended.append(watch.monotonic()))
    assert busy == []
    last_s = 2 * conductor.BUSY_POLL_S
    assert watch.monotonic() == pytest.approx(last_s + conductor.QUIET_S)
    assert ended[0] == 0.0


def test_who_was_never_needed_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    monkeypatch.setattr(conductor, "time", watch)
    assert conductor.Turns(lambda: False).come(bool, lambda: pytest.fail("ended a child"))
    assert watch.monotonic() == 0.0


def noted(told: list[str]) -> Turn:
    """A turn that can be had at once; `told` has when it begins and ends."""

    @contextmanager
    def turn() -> Iterator[None]:
        told.append("begins")
        yield
        told.append("ends")

    return turn


def test_no_turn_is_held_while_a_class_is_compiled_or_noted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conductor, "PATIENCE_S", 0.0)
    told: list[str] = []
    ended = threading.Event()

    @contextmanager
    def turn() -> Iterator[None]:
        yield
        told.append("ends")
        ended.set()

    def made(spec: KernelSpec, row: object) -> build.CodeObject:
        told.append("compiled" if ended.wait(600) else "compiled within the turn")
        raise CompileError("clang", "no such thing")

    first, second = scaling.subject(2.0), scaling.subject(3.0)
    monkeypatch.setattr(build, "build", build_beside(made, "another"))
    second = replace(second, specs=(replace(scaling.SPEC, entry="another"),))
    found = Conductor(place, busy=lambda: True, turn=turn).run([first, second])
    assert [verdict.outcome for _, verdict in found] == [PASSED, REFUSED]
    assert told == ["ends", "compiled"]


def test_while_the_card_is_needed_classes_are_noted_and_a_child_waits_to_open_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[float] = []
    heads: list[dict[str, Any]] = []
    ended: list[Answering] = []
    alone = recorder.recordings

    def recordings(op: Any, variant: Any, config: Any, problem: Any) -> Any:
        noted.append(problem.factor)
        return alone(op, variant, config, problem)

    def spawn() -> Any:
        heads.append({"kind": "spawned"})
        return Answering(heads, ended)

    def busy() -> bool:
        return len(noted) < 3 or not heads

    monkeypatch.setattr(recorder, "recordings", recordings)
    made = Conductor(place, busy=busy, spawn=spawn)
    found = made.run([scaling.subject(factor) for factor in (2.0, 3.0, 4.0)])
    assert [verdict.outcome for _, verdict in found] == [PASSED] * 3
    assert [head["kind"] for head in heads] == ["spawned", "open", *["class"] * 3]
    assert len(ended) == 1


@pytest.mark.parametrize(("free", "spawned"), [(conductor.PLENTY_BYTES, 1), (1 << 30, 2)])
def test_where_memory_is_plenty_a_child_stays_while_the_card_is_needed(
    place: Place, free: int, spawned: int
) -> None:
    heads: list[dict[str, Any]] = []
    ended: list[Answering] = []
    needed = [False, True]
    spawns: list[Any] = []

    def spawn() -> Any:
        spawns.append(Answering(heads, ended))
        return spawns[-1]

    def busy() -> bool:
        begun = sum(head["kind"] == "class" for head in heads)
        return begun == 1 and bool(needed and needed.pop())

    made = Conductor(place, busy=busy, free=lambda: free, spawn=spawn)
    found = made.run([scaling.subject(2.0), scaling.subject(3.0)])
    assert [verdict.outcome for _, verdict in found] == [PASSED] * 2
    assert not needed
    assert len(spawns) == spawned
    assert len(ended) == spawned


def test_no_more_classes_are_noted_than_memory_is_there_for(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conductor, "AHEAD_BYTES", 2)
    monkeypatch.setattr(conductor, "MOST_NOTING", 1)
    enough, noted = threading.Event(), list[Subject]()

    def note(each: Subject) -> conductor._Letter:
        noted.append(each)
        if len(noted) == 2:
            enough.set()
        return conductor._Letter("", {}, [b"1"], torch=False, is_far=False, deaths=0)

    ahead = conductor._Ahead([scaling.subject(float(each)) for each in range(5)], note)
    assert enough.wait(600)
    assert len(noted) == 2
    for _ in range(5):
        assert ahead.next(bool, lambda: None) is not None
    ahead.close()
    assert len(noted) == 5
    assert not any(thread.is_alive() for thread in ahead._threads)


def test_where_no_second_thread_can_be_started_one_notes_all(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def only_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(threading.Thread, "start", only_one)
    refused = Verdict("", REFUSED)
    ahead = conductor._Ahead([scaling.subject(2.0), scaling.subject(3.0)], lambda each: refused)
    assert [ahead.next(bool, lambda: None) for _ in range(2)] == [refused, refused]
    ahead.close()
    assert not started[0].is_alive()


def test_a_child_that_died_before_it_opened_the_card_is_replaced(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    links: list[Link] = []
    busy = [True, True]

    def spawn() -> Link:
        links.append(Link([sys.executable, "-c", ""]) if not links else Link())
        return links[-1]

    made = Conductor(place, busy=lambda: bool(busy and busy.pop()), spawn=spawn)
    ((_, verdict),) = made.run([scaling.subject(2.0)])
    assert verdict.passed
    assert len(links) == 2


def build_beside(made: Callable[..., build.CodeObject], entry: str) -> Callable[..., Any]:
    """The real build, but `made` for this entry."""
    real = build.build
    return lambda spec, row: (made if spec.entry == entry else real)(spec, row)


def test_where_the_card_is_always_needed_a_turn_is_taken(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conductor, "PATIENCE_S", 0.0)
    told: list[str] = []

    def tried(subject: Subject, verdict: Verdict) -> None:
        told.append(verdict.outcome)

    made = Conductor(place, busy=lambda: True, turn=noted(told))
    made.run([scaling.subject(2.0), scaling.subject(3.0)], told=tried)
    assert told == ["begins", PASSED, PASSED, "ends"]

    told.clear()
    monkeypatch.setattr(conductor, "TURN_S", 0.0)  # others wait: one class each time
    made.run([scaling.subject(4.0), scaling.subject(5.0)], told=tried)
    assert told == ["begins", PASSED, "ends", "begins", PASSED, "ends"]


WINDOWS = {0xC0000005: FAULTED, 1: REFUSED}


@pytest.mark.parametrize("status", WINDOWS)
def test_statuses_of_windows(status: int) -> None:
    outcome, reason = ended(status, "")
    assert outcome == (WINDOWS[status])
    assert ("0xC0000005" in reason) == (outcome == FAULTED)


class Answering:
    """A child to which everything is right."""

    def __init__(self, heads: list[dict[str, Any]], ended: list[Answering]) -> None:
        self._heads, self._ended = heads, ended

    def send(self, head: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        self._heads.append(head)

    def receive(self, limit_s: float) -> dict[str, Any] | None:
        if self._heads[-1]["kind"] == "open":
            return {"kind": "ready"}
        if "fault" in self._heads[-1].get("torch", {}):
            return None
        return {"kind": "verdict", "outcome": PASSED, "reason": ""}

    def status(self) -> int:
        return -signal.SIGSEGV

    def words(self) -> str:
        return ""

    def end(self) -> None:
        self._ended.append(self)


def test_what_needs_torch_has_a_child_of_its_own_beside_the_other(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: list[dict[str, Any]] = []
    ended: list[Answering] = []
    noted_alone = recorder.recordings

    def recordings(op: Any, variant: Any, config: Any, problem: Any) -> Any:
        if problem.factor > 3:
            raise recorder.NeedsTorchError("between its launches")
        return noted_alone(op, variant, config, problem)

    def described(op: Any, variant: Any, config: Any, problems: Any) -> dict[str, Any]:
        return {"fault": True} if problems[0].factor == 6 else {"op": op.name}

    monkeypatch.setattr(recorder, "recordings", recordings)
    monkeypatch.setattr(conductor.torch_child, "description", described)

    def spawn() -> Any:
        return Answering(heads, ended)

    made = Conductor(place, spawn=spawn)
    subjects = [scaling.subject(factor) for factor in (2.0, 4.0, 3.0, 5.0)]
    found = made.run(subjects, keep=lambda: True)
    assert [verdict.outcome for _, verdict in found] == [PASSED] * 4
    opened = [head["torch"] for head in heads if head["kind"] == "open"]
    tried = ["torch" in head for head in heads if head["kind"] == "class"]
    assert (opened, tried, ended) == ([False, True], [False, True, False, True], [])
    (_, last), (_, halted) = made.run([scaling.subject(6.0), scaling.subject(7.0)])
    assert (last.outcome, halted.outcome) == (FAULTED, REFUSED)
    assert len(ended) == 3  # two with torch, the second of which died alone, and the one without


def test_a_process_that_cannot_be_ended_is_given_up(place: Place) -> None:
    class Stuck(Link):
        def kill(self) -> bool:
            super().kill()
            return False

    stuck = Stuck([sys.executable, "-c", "import time; time.sleep(60)"])
    made = Conductor(place, spawn=lambda: stuck, start_limit_s=0.2)
    subjects: list[Subject] = [scaling.subject(2.0), scaling.subject(3.0)]
    (_, first), (_, second) = made.run(subjects, force=True)
    assert first.outcome == HUNG
    assert (second.outcome, second.reason) == (
        REFUSED,
        "a process hangs in the driver and cannot be ended",
    )
    stuck.end()
