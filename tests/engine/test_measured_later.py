"""Performance where its host has moments between two pictures: the nearest problem's times decide
at once, and what is to be measured waits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd import cache
from lib_rocm_sd.engine import measure
from lib_rocm_sd.engine.gating import Asked, Refusal
from lib_rocm_sd.engine.measure import Timing, apart, save, stored_like
from lib_rocm_sd.engine.measurer import MOMENT_S
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.errors import LaunchError
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.group_norm.problem import GroupNormProblem
from lib_rocm_sd.ops.linear.problem import LinearProblem
from lib_rocm_sd.report import Report
from tests.clock import Clock
from tests.ops.toy_op import (
    CPU,
    GFX1100,
    Doubler,
    Doubling,
    Tile,
    User,
    engine_of,
    op_of,
    raising,
)

pytestmark = pytest.mark.usefixtures("fresh_cache")
SMALL, LARGE = Doubling(16, 8), Doubling(1000, 8)
LONG_S = 2e-2


class World:
    """A card on which, of two variants, the one is faster for few rows and the other for many."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.few = Doubler("few", 5, work=self._taking(lambda rows: rows > 100))
        self.many = Doubler("many", 1, work=self._taking(lambda rows: rows <= 100))
        self.op: Op[Any, Any] = op_of(self.few, self.many)

    def _taking(self, slow: Callable[[int], bool]) -> Callable[[torch.Tensor], torch.Tensor]:
        def work(x: torch.Tensor) -> torch.Tensor:
            self.clock.turn(LONG_S if slow(x.shape[0]) else 1e-4)
            return x * 2

        return work

    def timed(self, problem: Doubling) -> int:
        return self.few.calls(problem.rows) + self.many.calls(problem.rows)


@pytest.fixture
def world(clock: Clock) -> World:
    return World(clock)


def user_of(info: Any = GFX1100) -> User:
    """As a host with such moments calls an engine."""
    user, _ = engine_of(info)
    session = Session.of("Performance", report=Report())
    user.session = replace(session, later=lambda: True)
    return user


def runs(user: User, op: Op[Any, Any], problem: Doubling) -> str:
    """What runs `problem` now, by a call."""
    user.session.report.begin()
    made = user.run(op, op.make_inputs(problem, CPU, 1))
    assert made.shape == (problem.rows, problem.width)
    (row,) = user.session.report.snapshot()["rows"]
    return f"{row['variant']}: {row['why']}"


def test_a_first_call_measures_nothing_and_goes_by_autos_order(world: World) -> None:
    user = user_of()
    assert runs(user, world.op, LARGE) == "few: Auto: expected to be fastest"
    assert world.timed(LARGE) == 1 and user.unmeasured == 1
    assert len(user._routes) == 1, "the plan is kept"
    assert runs(user, world.op, LARGE).startswith("few: Auto") and user.unmeasured == 1


def test_autos_order_heeds_the_memory_that_is_free() -> None:
    user, _ = engine_of(free=1000)
    user.session = replace(Session.of("Performance", report=Report()), later=lambda: True)
    op = op_of(Doubler("greedy", 9, workspace_bytes=501), Doubler("modest", 1))
    assert user.plan(SMALL, CPU, op).variant.name == "modest"


def test_between_pictures_it_is_measured_and_the_next_uses_what_won(world: World) -> None:
    user = user_of()
    runs(user, world.op, LARGE)
    drops, renewals = user.drops, user.renewals
    user.measure_next()
    assert user.unmeasured == 0 and world.timed(LARGE) > 2
    assert (user.drops, user.renewals) == (drops + 1, renewals + 1)
    measured = world.timed(LARGE)
    assert runs(user, world.op, LARGE) == "many: Performance: fastest, 100.0 µs measured"
    assert world.timed(LARGE) == measured + 1 and user.unmeasured == 0


def test_inputs_that_take_longer_than_a_moment_do_not_keep_it_for_ever(
    world: World, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, sets = user_of(), measure.input_sets

    def slow(*given: Any) -> Any:
        clock.turn(2.0)
        return sets(*given)

    monkeypatch.setattr(measure, "input_sets", slow)
    runs(user, world.op, LARGE)
    moments = 0
    while user.unmeasured:
        user.measure_next()
        moments += 1
        assert moments <= 2, "one of two ways is timed in each"
    assert runs(user, world.op, LARGE).startswith("many: Performance: fastest")


def test_a_guess_that_was_right_keeps_its_plans_and_recordings(world: World) -> None:
    user = user_of()
    runs(user, world.op, SMALL)
    drops = user.drops
    user.measure_next()
    assert user.unmeasured == 0 and user.drops == drops


def test_the_nearest_of_the_class_decides_at_once(world: World) -> None:
    user = user_of()
    for problem in (SMALL, LARGE, Doubling(1100, 16)):
        runs(user, world.op, problem)
        user.measure_next()
    timed = world.timed(Doubling(700, 8))
    told = f"many: Performance: fastest, 100.0 µs measured, for {LARGE}, the nearest that is known"
    assert runs(user, world.op, Doubling(700, 8)) == told
    assert runs(user, world.op, Doubling(20, 8)).startswith("few: Performance: fastest")
    assert runs(user, world.op, Doubling(1100, 24)) == "few: Auto: expected to be fastest"
    assert user.unmeasured == 3 and world.timed(Doubling(700, 8)) == timed + 1


def test_times_of_an_earlier_process_are_the_nearest(world: World) -> None:
    for problem in (SMALL, LARGE):
        before, _ = engine_of(GFX1100)
        before.set_level("Performance")
        before.plan(problem, CPU, world.op)
    user = user_of()
    assert runs(user, world.op, Doubling(700, 8)).startswith("many: Performance: fastest")
    assert runs(user, world.op, Doubling(20, 8)).startswith("few: Performance: fastest")
    assert runs(user_of(), world.op, Doubling(700, 16)).startswith("few: Auto")


def test_the_nearests_config_is_self_tested_and_one_of_the_problems_own(clock: Clock) -> None:
    def slow(x: torch.Tensor) -> torch.Tensor:
        clock.turn(LONG_S)
        return x * 2

    tiles: dict[Any, Any] = {Tile(1): slow, Tile(2): lambda x: x * 2, Tile(3): slow}

    class Narrow(Doubler):
        def configs(self, arch: Any, problem: Doubling) -> Any:
            return self.tiles if problem.rows != 20 else (Tile(1),)

    ours = Narrow("ours", 9, ours=True, tiles=tuple(tiles), by_tile=tiles)
    op, user = op_of(ours), user_of()
    user.run(op, torch.ones(16, 8))
    user.measure_next()
    assert user.plan(Doubling(16, 8), CPU, op).config == Tile(2)
    assert user.plan(Doubling(20, 8), CPU, op).config == Tile(1)
    tested = sum(shape[0] < 16 and config == Tile(2) for _, config, shape in ours.seen)
    assert user.plan(Doubling(17, 8), CPU, op).config == Tile(2)
    tests_of_17 = sum(shape[0] < 16 and config == Tile(2) for _, config, shape in ours.seen)
    assert tests_of_17 == tested + 1, "its tail was tested, with the config that is taken"


def test_a_moment_ends_in_time_and_the_next_goes_on(clock: Clock) -> None:
    """Each call takes a third of a moment. What was timed in one is not timed in the next."""
    long_s = MOMENT_S / 3

    def slow(x: torch.Tensor) -> torch.Tensor:
        clock.turn(long_s if x.shape[0] > 10 else 0.0)
        return x * 2

    variants = [Doubler(name, work=slow) for name in "abcde"]
    op, user = op_of(*variants), user_of()
    user.run(op, torch.ones(1000, 8))
    timed: list[set[str]] = []
    while user.unmeasured:
        begin, calls = clock.now_s, {each.name: each.calls(1000) for each in variants}
        user.measure_next()
        assert clock.now_s - begin <= MOMENT_S + 2 * long_s
        timed.append({each.name for each in variants if each.calls(1000) > calls[each.name]})
    assert len(timed) == 2 and not timed[0] & timed[1] and timed[0] | timed[1] == set("abcde")


def test_what_takes_long_to_be_tested_is_timed_in_a_later_moment(clock: Clock) -> None:
    def testing(x: torch.Tensor) -> torch.Tensor:
        clock.turn(MOMENT_S / 4 if x.shape[0] < 10 else 1e-4)
        return x * 2

    tiles: dict[Any, Any] = {Tile(size): testing for size in range(6)}
    ours = Doubler("ours", 9, ours=True, tiles=tuple(tiles), by_tile=tiles)
    op, user = op_of(ours), user_of()
    user.run(op, torch.ones(1000, 8))
    for _ in range(2):
        begin = clock.now_s
        user.measure_next()
        assert user.unmeasured == 1 and ours.calls(1000) == 1
        assert clock.now_s - begin <= MOMENT_S + 2 * MOMENT_S / 4
    while user.unmeasured:
        user.measure_next()
    assert {config for _, config, shape in ours.seen if shape[0] == 1000} == set(tiles)


def test_interrupted_it_waits_on(world: World) -> None:
    user = user_of()
    runs(user, world.op, LARGE)
    timed = world.timed(LARGE)
    user.measure_next(interrupt=lambda: world.timed(LARGE) > timed)
    assert user.unmeasured == 1 and world.many.calls(LARGE.rows) == 0
    assert runs(user, world.op, LARGE).startswith("few: Auto")
    user.measure_next()
    assert user.unmeasured == 0
    assert runs(user, world.op, LARGE).startswith("many: Performance")


def test_the_first_that_was_put_off_comes_first_and_each_once(world: World) -> None:
    user = user_of()
    for problem in (SMALL, LARGE, SMALL):
        runs(user, world.op, problem)
    timed = world.timed(LARGE)
    user.measure_next()
    assert user.unmeasured == 1 and world.timed(LARGE) == timed
    user.measure_next()
    assert user.unmeasured == 0
    user.measure_next()  # nothing waits


def test_what_fails_while_it_is_measured_does_not_wait_for_ever(world: World) -> None:
    user = user_of()
    op = op_of(Doubler("odd", work=raising(LaunchError("status 1"), 3)), world.many)
    runs(user, op, LARGE)
    user.measure_next()
    assert user.unmeasured == 0
    assert runs(user, op, LARGE).startswith("many")


def test_a_gate_that_has_not_decided_is_asked_for_all_and_nothing_is_timed(world: World) -> None:
    """Measured when it has: its host renews the engine then, and the next call puts it off anew."""

    class Gate:
        undecided = True
        asked: set[Any] = set()  # noqa: RUF012 - one test's

        def refusal(self, asked: Asked) -> Refusal | None:
            self.asked.add(asked.config)
            return Refusal("being tried", waits=True) if self.undecided else None

        def vouches(self, asked: Asked) -> bool:
            return True

        def launching(self, asked: Asked, stage: str) -> None:
            return None

    tiles = {Tile(1): world.few.work, Tile(2): world.many.work}
    ours = Doubler("ours", 9, ours=True, tiles=tuple(tiles), by_tile=tiles)
    op, user = op_of(ours, world.few), user_of()
    user.gate = gate = Gate()
    assert runs(user, op, LARGE).startswith("few: Auto") and gate.asked == {Tile(1)}
    user.measure_next()
    assert gate.asked == {Tile(1), Tile(2)} and user.unmeasured == 0
    assert not ours.seen and world.few.calls(LARGE.rows) == 1
    gate.undecided = False
    user.renew()
    assert runs(user, op, LARGE).startswith("ours: Auto") and user.unmeasured == 1
    user.measure_next()
    assert runs(user, op, LARGE).startswith("ours: Performance: fastest, 100.0 µs")
    assert ours.seen[-1][1] == Tile(2)


def test_who_wants_the_figures_has_all_measured_first_and_nothing_put_off(world: World) -> None:
    user = user_of()
    runs(user, world.op, LARGE)
    with user.measuring_at_once():
        assert user.unmeasured == 0
        assert runs(user, world.op, LARGE).startswith("many: Performance")
        assert runs(user, world.op, SMALL).startswith("few: Performance")
    runs(user, world.op, Doubling(500, 8))
    assert user.unmeasured == 1


def test_hosts_without_such_moments_measure_before_the_first_call(world: World) -> None:
    user, _ = engine_of()
    user.set_level("Performance")
    assert runs(user, world.op, LARGE).startswith("many: Performance")
    assert user.unmeasured == 0


@pytest.mark.parametrize("fields", ["", "null", "[1]", '{"rows": 5}', '{"rows": 16, "no": 1}'])
def test_a_stored_problem_that_is_damaged_is_nobodys_nearest(fields: str) -> None:
    op = op_of(Doubler("one"))
    times = {"one": Timing(None, 1.0)}
    save(op, GFX1100, SMALL, times)
    save(op, GFX1100, LARGE, times)
    assert [*stored_like(op, GFX1100, Doubling(1, 1))] == [LARGE, SMALL]  # by name
    data = cache.read("tune", "gfx1100/doubling.json")
    assert data is not None
    content = json.loads(data)
    row = content["rows"][str(LARGE)]
    row.pop("problem")  # as earlier versions have left it
    if fields:
        row["problem"] = json.loads(fields)
    cache.write("tune", "gfx1100/doubling.json", json.dumps(content).encode())
    assert [*stored_like(op, GFX1100, Doubling(1, 1))] == [SMALL]


@pytest.mark.parametrize(
    ("problem", "near", "far"),
    [
        (  # self-attention of another size, rather than the prompt's
            AttentionProblem(2, 8, 8192, 8192, 40),
            AttentionProblem(2, 8, 4096, 4096, 40),
            AttentionProblem(2, 8, 8192, 77, 40),
        ),
        (  # the same layer, rather than as much work
            LinearProblem(4096, 320, (320,)),
            LinearProblem(2048, 320, (320,)),
            LinearProblem(512, 1280, (640,)),
        ),
        (
            GroupNormProblem(2, 320, 96, 64),
            GroupNormProblem(2, 320, 64, 64),
            GroupNormProblem(2, 640, 32, 32),
        ),
    ],
)
def test_what_nearest_is(problem: Any, near: Any, far: Any) -> None:
    assert 0 == apart(problem, problem) < apart(problem, near) < apart(problem, far)
