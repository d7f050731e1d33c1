"""Variants that only Performance asks, and takes only by a measured time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd.engine import planner
from lib_rocm_sd.engine.gating import Asked
from lib_rocm_sd.engine.route import by_torch
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.ops.base import Op
from tests.clock import Clock
from tests.ops.toy_op import CPU, Doubler, Doubling, Inputs, X, engine_of, op_of, taking

pytestmark = pytest.mark.usefixtures("fresh_cache", "clock")
PROBLEM = Doubling(10, 8)


def with_library(library: Doubler, clock: Clock) -> Op[Any, Any]:
    op = op_of(Doubler("own", 9, work=taking(1e-2, clock)))
    return replace(op, measured_only=(library,))


@pytest.mark.parametrize("level", ["Auto", "Memory"])
def test_other_levels_do_not_even_ask_it(level: str, clock: Clock) -> None:
    class Untouched(Doubler):
        def refusals(self, arch: Any, problem: Any) -> list[str]:
            raise AssertionError("asked")

    engine, _ = engine_of()
    engine.set_level(level)
    op = with_library(Untouched("library", 99), clock)
    plan = engine.plan(PROBLEM, CPU, op)
    assert plan.variant.name == "own" and "library" not in plan.refusals
    assert torch.equal(engine.run(op, Inputs(X)), X * 2)
    assert torch.equal(by_torch(op, Inputs(X)), X * 2)
    assert [variant.name for variant in op.every] == ["own", "library"]


def test_performance_takes_it_where_it_was_the_fastest(clock: Clock) -> None:
    quick, slow = (Doubler("library", work=taking(s, clock)) for s in (1e-4, 2e-2))
    for library, name in ((quick, "library"), (slow, "own")):
        engine, _ = engine_of()
        engine.set_level("Performance")
        plan = engine.plan(replace(PROBLEM, width=8 + len(name)), CPU, with_library(library, clock))
        assert plan.variant.name == name and "measured" in plan.why
        assert library.seen


def test_its_stored_time_counts_in_the_next_process(clock: Clock) -> None:
    for library in (Doubler("library", work=taking(1e-4, clock)), Doubler("library")):
        engine, _ = engine_of()
        engine.set_level("Performance")
        plan = engine.plan(PROBLEM, CPU, with_library(library, clock))
        assert plan.variant.name == "library" and "100.0 µs measured" in plan.why
    assert library.calls(PROBLEM.rows) == 0  # self-tests only
    assert library.seen


def test_a_wrong_or_refusing_one_is_not_taken(clock: Clock) -> None:
    wrong = Doubler("library", work=lambda x: x * 3)
    absent = Doubler("library", refuses=["it is not installed"])
    for library, told in ((wrong, "self-test failed"), (absent, "it is not installed")):
        engine, _ = engine_of()
        engine.set_level("Performance")
        op = with_library(library, clock)
        plan = engine.plan(replace(PROBLEM, width=8 + len(told)), CPU, op)
        assert plan.variant.name == "own"
        assert any(told in why for why in plan.refusals["library"])
        assert library.calls(PROBLEM.rows) == 0


def test_what_was_not_measured_is_not_taken(clock: Clock) -> None:
    """However much it is preferred: where another thread measures, or a user interrupts."""
    engine, _ = engine_of()
    library = Doubler("library", 99)
    op = with_library(library, clock)
    engine.session = Session.of("Performance", report=engine.session.report)
    engine.session = replace(engine.session, interrupt=lambda: True)
    plan = engine.plan(PROBLEM, CPU, op)
    assert plan.variant.name == "own" and plan.refusals["library"] == ["was not measured"]


def test_a_graph_capture_does_not_begin_with_it(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is known from another process, but this one has not tested it."""
    first, _ = engine_of()
    first.set_level("Performance")
    first.plan(PROBLEM, CPU, with_library(Doubler("library", work=taking(1e-4, clock)), clock))
    engine, _ = engine_of()
    engine.set_level("Performance")
    library = Doubler("library")
    op = with_library(library, clock)
    inner: Any = engine.engine._planner
    inner.known.of(engine.session, op, PROBLEM, CPU)
    monkeypatch.setattr(planner, "is_recording", lambda device: True)
    plan = inner.plan(engine.session, op, PROBLEM, CPU)
    assert plan.variant.name == "own" and not library.seen


def test_a_host_that_has_kernels_tried_does_without_those_that_no_trial_knows(
    clock: Clock,
) -> None:
    engine, _ = engine_of()
    engine.set_level("Performance")
    library = Doubler("library", work=taking(1e-4, clock))
    library.untried = True
    op = with_library(library, clock)
    engine.gate = Allowing()
    plan = engine.plan(PROBLEM, CPU, op)
    assert plan.variant.name == "own" and plan.refusals["library"] == [planner.UNTRIED]
    assert not library.seen
    engine.gate = None
    assert engine.plan(PROBLEM, CPU, op).variant.name == "library"


class Allowing:
    """A gate that refuses nothing."""

    def refusal(self, asked: Any) -> None:
        return None


def test_it_is_asked_on_the_card_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    on: list[torch.device] = []

    @contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        on.append(device)
        yield
        on.pop()

    class Asking(Doubler):
        def refusals(self, arch: Any, problem: Any) -> list[str]:
            return [f"asked on {[str(device) for device in on]}"]

    monkeypatch.setattr(torch.cuda, "device", entered)
    library, second = Asking("library"), torch.device("cuda", 1)
    op = replace(op_of(), measured_only=(library,))
    inner: Any = engine_of()[0].engine._planner
    for begun, device, told in ((True, second, ["cuda:1"]), (True, CPU, []), (False, second, [])):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda begun=begun: begun)
        assert inner.refusals(Asked(op, library, None, PROBLEM, device)) == [f"asked on {told}"]
