"""The engine behind its gate: ours only after a trial; whatever happens, the call is computed."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.engine.gating import Asked
from lib_rocm_sd.runtime import build
from lib_rocm_sd.trials import gate, verdicts
from lib_rocm_sd.trials.conductor import Conductor
from lib_rocm_sd.trials.gate import WAITS, Gate
from lib_rocm_sd.trials.link import Link
from lib_rocm_sd.trials.subject import Subject
from tests.ops.toy_op import CPU
from tests.trials import scaling
from tests.trials.scaling import SCALING, Inputs
from tests.trials.world import World, X, again, key_of
from tests.waiting import wait_until


def test_ours_is_used_once_a_child_has_found_it_right(world: World) -> None:
    world.busy = True
    assert world.run() == "torch"
    assert WAITS in world.why()
    assert world.launch.count == 0
    assert world.gate.state().running
    world.busy = False
    world.settled()
    assert world.renewed == 1
    assert world.run() == "rocm_sd"
    state = world.gate.state()
    assert (state.running, state.halted, state.refused) == (False, "", ())
    assert world.launch.count == len(SCALING.test_problems(scaling.Scaling(1024, 2.0))) + 1


def test_with_all_verdicts_nothing_is_started(world: World) -> None:
    world.run()
    world.settled()
    later = again(world)
    assert later.run() == "rocm_sd"
    assert later.children == 0
    assert later.said == []


def test_a_plan_is_kept_while_its_class_is_tried(world: World) -> None:
    world.busy = True
    world.run()
    routes = world.user.engine._routes
    world.run()
    assert world.user.engine._routes is routes
    assert len(routes) == 1


@pytest.mark.parametrize("how", ["abort", "segv", "fault", "wrong", "nan"])
def test_what_a_child_dies_of_never_runs_here(
    world: World, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCM_SD_FAKE_HIP", f"{how}:1")
    assert world.run() == "torch"
    world.settled()
    assert world.run() == "torch"
    assert world.launch.count == 0
    ((subject, reason),) = world.gate.state().refused
    assert reason == world.why()
    assert subject in world.said[1]
    assert any(reason in event for event in world.user.session.report.snapshot()["events"])
    later = again(world)
    assert later.run() == "torch"
    assert (later.why(), later.children) == (reason, 0)


def test_after_a_fault_other_classes_wait_until_somebody_asks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCM_SD_FAKE_HIP", "abort:1")
    world.run(2.0)
    world.settled()
    assert world.run(3.0) == "torch"
    assert "we stopped testing kernels on this card" in world.why(3.0)
    assert "we stopped testing kernels on this card" in world.gate.state().halted
    later = again(world)
    assert later.run(3.0) == "torch"
    assert later.gate.state().halted == world.gate.state().halted
    monkeypatch.setenv("ROCM_SD_FAKE_HIP", "right:0")
    assert world.gate.ask() == 2
    world.settled()
    assert (world.run(2.0), world.run(3.0)) == ("rocm_sd", "rocm_sd")
    assert world.gate.state().refused == ()


def test_a_new_driver_is_tried_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCM_SD_FAKE_HIP", "abort:1")
    world.run()
    world.settled()
    monkeypatch.setenv("ROCM_SD_FAKE_HIP", "right:0")
    later = again(world, "driver 2")
    later.run()
    later.settled()
    assert later.run() == "rocm_sd"


def test_what_was_not_compiled_yet_is_compiled_by_the_gate(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build.cached
    monkeypatch.setattr(build, "cached", lambda spec, row: None)
    assert world.run() == "torch"
    world.settled()
    monkeypatch.setattr(build, "cached", made)
    later = again(world)
    assert later.run() == "rocm_sd"
    assert later.children == 0


def test_what_is_expected_is_tried_before_it_is_asked_for(world: World) -> None:
    world.busy = True

    def work(arch: Arch) -> list[Subject]:
        return [scaling.subject(factor) for factor in (2.0, 3.0)]

    left = world.gate.expect(CPU, world.launch, work)
    assert (left(), world.gate.state().total) == (2, 2)
    assert left() == world.gate.expect(CPU, world.launch, work)()
    assert world.gate.state().total == 2
    world.busy = False
    world.settled()
    assert left() == 0
    assert (world.run(2.0), world.run(3.0)) == ("rocm_sd", "rocm_sd")
    assert world.children <= 2


def test_another_order_holds_for_what_waits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when another checkpoint is chosen: also for what a conductor has taken already, and for
    what is expected later.
    """
    tried: list[float] = []

    def told(subject: Subject, verdict: verdicts.Verdict) -> bool:
        tried.append(subject.problem.factor)
        return True

    known = world.gate._done
    monkeypatch.setattr(world.gate, "_done", lambda place, s, v: told(s, v) and known(place, s, v))

    def expect(*factors: float) -> None:
        world.gate.expect(CPU, world.launch, lambda arch: map(scaling.subject, factors))

    world.busy = True
    expect(2.0, 3.0, 4.0, 5.0)
    assert wait_until(lambda: len(world.gate._batch) == 4)
    world.gate.order(map(scaling.subject, (2.0, 3.0)))
    assert not world.gate._recalled
    world.gate.order(map(scaling.subject, (6.0, 5.0, 3.0)))
    expect(6.0)
    assert (world.gate.state().done, world.gate.state().total) == (0, 5)
    world.busy = False
    world.settled()
    assert tried == [6.0, 5.0, 3.0, 2.0, 4.0]
    assert (world.gate.state().done, world.gate.state().refused) == (5, ())
    assert world.children == 1, "who makes the next batch has the same child"


def test_children_of_another_kind_of_card_are_ended_first(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried_before: list[int] = []
    other = Conductor(scaling.place(Path("another")))
    monkeypatch.setattr(other, "rest", lambda: tried_before.append(world.gate.state().done))
    world.gate._conductors[other.place] = other
    world.run()
    world.settled()
    assert tried_before[0] == 0 and world.run() == "rocm_sd"


def test_a_halt_is_told_before_anything_is_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCM_SD_FAKE_HIP", "abort:1")
    world.run()
    world.settled()
    later = again(world)
    assert later.gate.expect(CPU, later.launch)() == 0
    assert "we stopped testing kernels on this card" in later.gate.state().halted
    assert later.children == 0


def test_what_is_compiled_again_is_looked_up_anew(world: World) -> None:
    world.run()
    world.settled()
    verdicts.forget(key_of(world))
    assert world.run() == "rocm_sd"
    world.busy = True
    world.gate.forget()
    world.user.engine.reset()
    assert world.run() == "torch"
    assert WAITS in world.why()


def test_a_patient_session_waits_for_the_first_trial(world: World) -> None:
    world.user.session = world.user.session.patiently()
    assert world.run() == "rocm_sd"
    assert world.user.usable(CPU, SCALING) == []
    assert world.user.plan(scaling.Scaling(1024, 3.0), CPU, SCALING).variant.name == "rocm_sd"


def test_a_patient_sessions_classes_are_tried_by_one_child(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.user.session = world.user.session.patiently()
    assert world.run(2.0) == "rocm_sd"  # may be tried before somebody is seen to wait
    assert [world.run(factor) for factor in (3.0, 4.0)] == ["rocm_sd"] * 2
    link, before = world.links[-1], len(world.links)
    assert before <= 2 and world.gate._thread is not None
    monkeypatch.setattr(gate, "KEPT_S", 0.0)
    assert world.run(5.0) == "rocm_sd"
    world.gate._thread.join(600)
    assert link.status() == 0
    assert world.run(6.0) == "rocm_sd"
    assert len(world.links) == before + 1


def is_alive(link: Link) -> bool:
    return link._process.poll() is None


def test_a_child_that_is_kept_ends_with_its_program(world: World) -> None:
    world.user.session = world.user.session.patiently()
    assert [world.run(factor) for factor in (2.0, 3.0)] == ["rocm_sd"] * 2
    link, thread = world.links[-1], world.gate._thread
    assert is_alive(link) and thread is not None and thread.is_alive()
    begin = time.monotonic()
    world.gate.stop()
    assert time.monotonic() - begin < gate.KEPT_S / 2
    assert not thread.is_alive() and not is_alive(link)


def test_a_kept_child_ends_when_somebody_needs_the_card(world: World) -> None:
    world.user.session = world.user.session.patiently()
    assert [world.run(factor) for factor in (2.0, 3.0)] == ["rocm_sd"] * 2
    link, thread = world.links[-1], world.gate._thread
    assert is_alive(link) and thread is not None
    world.busy = True
    thread.join(gate.KEPT_S / 2)
    assert not thread.is_alive() and not is_alive(link)
    world.busy = False


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_kept_child_that_dies_meanwhile_is_no_classs_fault(world: World, how: int) -> None:
    world.user.session = world.user.session.patiently()
    assert [world.run(factor) for factor in (2.0, 3.0)] == ["rocm_sd"] * 2
    link = world.links[-1]
    link._process.send_signal(how)
    link._process.wait(600)
    assert world.run(4.0) == "rocm_sd"
    assert world.links[-1] is not link
    assert (world.gate.state().refused, world.gate.state().halted) == ((), "")


def test_what_a_conductor_gave_up_is_asked_for_again_once_all_is_tried(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "KEPT_S", 1.0)
    world.run(2.0)
    world.settled()
    assert world.gate._thread is not None
    world.gate._thread.join(600)
    assert not world.gate._thread.is_alive()
    assert world.gate._conductors == {}


@pytest.mark.parametrize("part", ["renew", "busy"])
def test_a_host_that_fails_stops_no_later_trial(
    world: World, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> bool:
        raise ValueError("no such host")

    with monkeypatch.context() as patch:
        patch.setattr(world.gate, f"_{part}", fails)
        world.run(2.0)
        world.settled()
    assert any("no such host" in line for line in world.said)
    world.gate._conductors.clear()  # which ask what they were given
    assert world.run(3.0) == "torch"
    world.settled()
    world.user.engine.renew()
    assert world.run(3.0) == "rocm_sd"


def test_without_a_thread_nothing_is_tried_and_nothing_hangs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        assert world.run(2.0) == "torch"
        assert world.gate.wait(1)
        world.gate.stop()
    assert "can't start new thread" in world.said[-1]


def test_a_patient_session_goes_on_where_nothing_more_is_tried(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCM_SD_FAKE_HIP", "abort:1")
    world.user.session = world.user.session.patiently()
    assert (world.run(2.0), world.run(3.0)) == ("torch", "torch")
    world.gate.stop()
    verdicts.forget(world.place.halt_key)
    assert world.run(4.0) == "torch"


def test_usable_says_that_it_waits(world: World) -> None:
    world.busy = True
    assert WAITS in world.user.usable(CPU, SCALING)[0]
    assert world.user.engine.waits(CPU, SCALING)
    world.busy = False
    world.settled()
    assert world.user.known(CPU, SCALING) is None
    assert world.user.usable(CPU, SCALING) == []
    assert not world.user.engine.waits(CPU, SCALING)


def test_a_program_that_ends_waits_for_no_trial_and_blames_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCM_SD_FAKE_HIP", "hang:1")
    begun = threading.Event()
    receive = Link.receive

    def noted(link: Link, limit_s: float) -> Any:
        answer = receive(link, limit_s)
        if answer and answer["kind"] == "trying":
            begun.set()
        return answer

    monkeypatch.setattr(Link, "receive", noted)
    world.run()
    assert begun.wait(600)
    world.gate.stop()
    assert world.gate._thread is not None
    assert not world.gate._thread.is_alive()
    assert list(verdicts.every()) == []
    assert again(world).started == []


# -- the engine


def test_performance_measures_what_was_tried(world: World, brief_tuning: None) -> None:
    world.user.set_level("Performance")
    world.busy = True
    assert world.run() == "torch"
    planner = world.user.engine._planner
    assert not planner.known.was_tried(
        SCALING, SCALING.variants[0], scaling.Scaling(1024, 2.0), CPU
    )
    world.busy = False
    world.settled()
    world.run()
    assert planner.known.was_tried(SCALING, SCALING.variants[0], scaling.Scaling(1024, 2.0), CPU)


def test_the_second_look_is_left_out_when_it_has_taken_long_enough(world: World) -> None:
    for factor in (2.0, 3.0):
        world.run(factor)
    world.settled()
    planner, clock = world.user.engine._planner, iter(range(100))
    planner._clock = lambda: float(next(clock))
    launches = []
    for factor in (2.0, 3.0):
        before = world.launch.count
        assert world.run(factor) == "rocm_sd"
        launches.append(world.launch.count - before)
    assert launches == [3, 2]  # of the second class only the problem that no child had


def test_without_a_trial_every_self_test_is_run(world: World) -> None:
    world.gate._places[CPU] = None
    world.user.engine._planner._looked_s = 1e9
    assert world.run() == "rocm_sd"
    assert world.launch.count == 3


def test_reset_keeps_the_gate_and_none_takes_it_away(world: World) -> None:
    world.busy = True
    world.user.engine.reset()
    assert world.run() == "torch"
    world.user.engine.gate = None
    assert world.run() == "rocm_sd"


def test_a_card_without_the_drivers_launcher_has_no_gate(world: World) -> None:
    gate = Gate(renew=lambda: None, place_of=lambda device, launch: None)
    asked = Asked(SCALING, SCALING.variants[0], None, scaling.Scaling(1024, 2.0), CPU, None)
    assert gate.refusal(asked) is None
    assert gate.launching(asked, "call") is None
    gate.failed(asked, "an illegal memory access")


def test_it_asks_while_another_thread_plans(world: World) -> None:
    """`renew` takes the engine's lock, which a thread that asks the gate holds."""
    threads = [
        threading.Thread(target=world.user.run, args=(SCALING, Inputs(X, float(factor))))
        for factor in range(2, 6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not any(thread.is_alive() for thread in threads)
    world.settled()
    assert [world.run(float(factor)) for factor in range(2, 6)] == ["rocm_sd"] * 4


def test_a_class_is_made_out_once_for_each_problem(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate is asked when a plan is made, and again when it is launched first."""
    world.run()
    world.settled()
    made: list[Any] = []
    make = Subject.of

    def counted(*words: Any) -> Subject:
        made.append(words[3])
        return make(*words)

    monkeypatch.setattr(Subject, "of", counted)
    for _ in range(2):
        world.user.engine.renew()
        assert world.run() == "rocm_sd"
    assert made == []
    world.gate._subjects._found.clear()
    world.user.engine.renew()
    assert world.run() == "rocm_sd"
    assert len(made) == 1


def test_the_state_says_how_long_the_others_will_take(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[int, float]] = []
    begun_s = time.monotonic() - 10.0

    def renew() -> None:
        state = world.gate.state()
        shown.append((state.done, state.left_s))
        world.gate._begun_s = begun_s

    monkeypatch.setattr(world.gate, "_renew", renew)
    world.busy = True
    for factor in (2.0, 3.0, 4.0):
        world.run(factor)
    assert world.gate.state().left_s == 0.0
    world.busy = False
    world.settled()
    assert [done for done, _ in shown] == [1, 2, 3]
    assert shown[1][1] >= 5.0  # two took ten seconds
    assert shown[2][1] == 0.0
