"""The engine behind its gate: ours only after a trial; whatever happens, the call is computed."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.engine.gating import Asked
from lib_rocm_sd.errors import LaunchError
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import build
from lib_rocm_sd.trials import verdicts
from lib_rocm_sd.trials.conductor import Conductor
from lib_rocm_sd.trials.gate import WAITS, Gate
from lib_rocm_sd.trials.journal import Journal
from lib_rocm_sd.trials.link import Link
from lib_rocm_sd.trials.place import Place
from lib_rocm_sd.trials.subject import Subject
from lib_rocm_sd.trials.verdicts import FAULTED, INTERRUPTED, PASSED
from tests.ops.toy_op import CPU, GFX1100, User
from tests.runtime.driver_doubles import ScaleParams
from tests.trials import scaling
from tests.trials.scaling import SCALING, Inputs

X = torch.arange(1024.0)
DIES = """
import os, sys
from pathlib import Path
from lib_rocm_sd.trials.journal import Journal
with Journal(Path(sys.argv[1])).trying(sys.argv[2], "scaling", "Card"):
    os.{how}
"""


class Launching:
    """A launch in this process; `error` is raised by it, once."""

    def __init__(self) -> None:
        self.count = 0
        self.error: Exception | None = None
        self.during: Callable[[], None] = lambda: None

    def __call__(self, spec: KernelSpec, grid: int, block: int, params: Any, device: Any) -> None:
        self.count += 1
        self.during()
        error, self.error = self.error, None
        if error is not None:
            raise error
        p = ScaleParams.from_buffer_copy(bytes(params))
        x = (ctypes.c_float * p.count).from_address(p.x)
        out = (ctypes.c_float * p.count).from_address(p.out)
        for place in range(p.count):
            out[place] = p.a * x[place] + x[place ^ 1]


class World:
    """An engine with a gate, whose card is the stand-in's."""

    def __init__(self, place: Place, journal: Path) -> None:
        self.launch = Launching()
        self.said: list[str] = []
        self.renewed = 0
        self.busy = False
        self.children = 0
        self.place = place
        self.journal = Journal(journal)
        self.user = User(
            Engine(
                identify=lambda device: GFX1100,
                launcher=lambda device, arch: self.launch,
                free=lambda device, headroom: 1 << 40,
            )
        )
        self.gate = Gate(
            renew=self._renew,
            say=self.said.append,
            busy=lambda: self.busy,
            journal=self.journal,
            place_of=lambda device, launch: place,
            conductor=self._conductor,
        )
        self.started = self.gate.start()
        self.user.engine.gate = self.gate

    def _renew(self) -> None:
        self.renewed += 1
        self.user.engine.renew()

    def _conductor(self, place: Place, **how: Any) -> Conductor:
        self.children += 1
        return Conductor(place, **how)

    def run(self, factor: float = 2.0) -> str:
        """The variant that computed a call; it was right."""
        self.user.session.report.begin()
        out = self.user.run(SCALING, Inputs(X, factor))
        assert torch.equal(out, X * factor + scaling.swapped(X))
        rows = self.user.session.report.snapshot()["rows"]
        (variant,) = {row["variant"] for row in rows if row["calls"]}
        return str(variant)

    def why(self, factor: float = 2.0) -> str:
        plan = self.user.plan(scaling.Scaling(1024, factor), CPU, SCALING)
        return "; ".join(plan.refusals["rocm_sd"])

    def settled(self) -> None:
        assert self.gate.wait(60)


@pytest.fixture
def world(ready: Path, hip_file: Path, tmp_path: Path) -> Iterator[World]:
    made = World(scaling.place(hip_file), tmp_path / "journal")
    yield made
    made.gate.stop()
    made.settled()


def again(before: World, *software: str) -> World:
    """The same machine at the next start of the program."""
    place = scaling.place(Path(before.place.library), *software)
    return World(place, before.journal._folder or Path())


def key_of(world: World, factor: float = 2.0) -> str:
    subject = scaling.subject(factor)
    return subject.key(world.place, subject.digests(world.place.arch, {}))


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
    assert "nothing more of ours is tried" in world.why(3.0)
    assert "nothing more" in world.gate.state().halted
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


def test_a_halt_is_told_before_anything_is_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCM_SD_FAKE_HIP", "abort:1")
    world.run()
    world.settled()
    later = again(world)
    assert later.gate.expect(CPU, later.launch)() == 0
    assert "nothing more of ours is tried" in later.gate.state().halted
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
    assert begun.wait(60)
    world.gate.stop()
    assert world.gate._thread is not None
    assert not world.gate._thread.is_alive()
    assert list(verdicts.every()) == []
    assert again(world).started == []


# -- the journal


def test_the_first_launches_stand_in_the_journal_and_later_ones_cost_nothing(
    world: World, tmp_path: Path
) -> None:
    world.run()
    world.settled()
    folder, seen = tmp_path / "journal", []
    world.launch.during = lambda: seen.append(len(list(folder.iterdir())))
    world.run()
    assert seen == [1, 0, 1]  # the class's self-test, its second problem, its first call
    world.run()
    assert seen == [1, 0, 1, 0]
    (route,) = world.user.engine._routes.values()
    assert route.run == SCALING.variants[0].run
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_fault_that_comes_only_here_is_barred_at_the_next_start(world: World) -> None:
    world.run()
    world.settled()
    die(world, "abort()")
    later = again(world)
    (barred,) = later.started
    assert barred.outcome == FAULTED
    assert "Aborted" in later.said[0]
    assert (later.run(), later.children) == ("torch", 0)
    assert (later.run(3.0), later.started) == ("torch", [barred])
    later.settled()
    assert later.run(3.0) == "rocm_sd"
    assert again(later).started == []
    assert again(later, "driver 2").why() != later.why()


def test_a_closed_window_is_forgiven_once(world: World) -> None:
    world.run()
    world.settled()
    die(world, "_exit(0)")
    later = again(world)
    assert [verdict.outcome for verdict in later.started] == [INTERRUPTED]
    assert later.run() == "torch"
    later.settled()
    assert later.run() == "rocm_sd"
    die(world, "_exit(0)")
    last = again(world)
    assert last.run() == "torch"
    assert last.children == 0
    assert "2 times" in last.why()


def test_who_asks_after_two_such_ends_is_answered_until_the_next(world: World) -> None:
    world.run()
    world.settled()
    for _ in range(2):
        die(world, "_exit(0)")
        again(world)
    asked = again(world)
    assert asked.run() == "torch"
    assert asked.gate.ask() == 1
    asked.settled()
    assert asked.run() == "rocm_sd"
    die(world, "_exit(0)")
    last = again(world)
    assert (last.run(), last.children) == ("torch", 0)
    assert "3 times" in last.why()


def die(world: World, how: str) -> None:
    """A process that ends in the first launch of the class."""
    folder = str(world.journal._folder)
    command = [sys.executable, "-c", DIES.format(how=how), folder, key_of(world)]
    root = Path(__file__).parents[2]
    subprocess.run(command, cwd=root, check=False, capture_output=True, timeout=60)
    assert len(os.listdir(folder)) == 1  # noqa: PTH208


@pytest.mark.parametrize("stage", ["self-test", "call"])
def test_an_error_of_the_driver_here_bars_the_class_for_later_too(world: World, stage: str) -> None:
    world.run()
    world.settled()
    if stage == "call":
        world.run()
        world.user.engine.renew()
    world.launch.error = LaunchError("hipModuleLaunchKernel: an illegal memory access", 700)
    assert world.run() == "torch"
    assert "illegal memory access" in world.why()
    later = again(world)
    assert (later.run(), later.children) == ("torch", 0)
    verdict = verdicts.read(key_of(world))
    assert verdict is not None
    assert verdict.outcome == FAULTED


def test_too_little_memory_here_bars_nothing_for_later(world: World) -> None:
    world.run()
    world.settled()
    world.launch.error = LaunchError("hipModuleLaunchKernel: too many resources (701)", 701)
    assert world.run() == "torch"
    verdict = verdicts.read(key_of(world))
    assert verdict is not None
    assert verdict.outcome == PASSED


# -- the engine


def test_performance_measures_what_was_tried(world: World, brief_tuning: None) -> None:
    world.user.set_level("Performance")
    world.busy = True
    assert world.run() == "torch"
    planner = world.user.engine._planner
    assert not planner.was_tried(SCALING, SCALING.variants[0], scaling.Scaling(1024, 2.0), CPU)
    world.busy = False
    world.settled()
    world.run()
    assert planner.was_tried(SCALING, SCALING.variants[0], scaling.Scaling(1024, 2.0), CPU)


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
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    world.settled()
    assert [world.run(float(factor)) for factor in range(2, 6)] == ["rocm_sd"] * 4
