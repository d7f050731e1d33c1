"""Performance in ComfyUI: what a workflow puts off is measured when the next one begins."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from lib_rocm_sd import report
from lib_rocm_sd.engine.measurer import LEAST_S, MOMENT_S
from lib_rocm_sd.hosts.comfyui import host, status
from tests.clock import Clock


class Engine:
    """Has so many problems to measure, each of which takes so long."""

    def __init__(self, clock: Clock, unmeasured: int, takes_s: float) -> None:
        self.clock, self.unmeasured, self.takes_s = clock, unmeasured, takes_s
        self.given_s: list[float] = []
        self.error: Exception | None = None
        self.ends: Callable[[], None] = lambda: None

    def measure_next(self, seconds: float, interrupt: Callable[[], bool]) -> None:
        self.given_s.append(seconds)
        if self.error is not None:
            raise self.error
        self.clock.turn(self.takes_s)
        self.unmeasured -= 1
        self.ends()


@pytest.fixture
def engine(comfy: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch) -> Engine:
    clock = Clock()
    made = Engine(clock, 9, MOMENT_S / 4)
    monkeypatch.setattr(host, "perf_counter", clock)
    monkeypatch.setattr(host, "engine", made)
    return made


def test_it_is_measured_for_a_moment_as_the_next_workflow_begins(
    prompt: Any, engine: Engine
) -> None:
    host.count_for_workflow()
    assert not engine.given_s, "a workflow measures nothing after it has begun"
    prompt.last_prompt_id = "second"
    for _ in range(3):
        host.count_for_workflow()
    assert engine.given_s == [MOMENT_S, 0.75 * MOMENT_S, LEAST_S]
    prompt.last_prompt_id = "third"
    host.count_for_workflow()
    assert engine.unmeasured == 3
    for name in ("fourth", "fifth"):
        prompt.last_prompt_id = name
        host.count_for_workflow()
    assert engine.unmeasured == 0 and len(engine.given_s) == 9


def test_cancel_ends_it(prompt: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = [False]
    monkeypatch.setattr(host, "interrupted", lambda: stopped[0])
    engine.ends = lambda: stopped.append(stopped.pop() or True)
    prompt.last_prompt_id = "second"
    host.count_for_workflow()
    assert len(engine.given_s) == 1


def test_what_fails_there_does_not_fail_the_workflow(prompt: Any, engine: Engine) -> None:
    engine.error = RuntimeError("planted")
    prompt.last_prompt_id = "second"
    host.count_for_workflow()
    assert len(engine.given_s) == 1
    assert "measuring ended: RuntimeError: planted" in report.snapshot()["events"]


def test_it_is_put_off_while_the_server_runs_workflows(
    prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = host.session_of("Performance")
    assert session.later()
    prompt.last_prompt_id = None
    assert not session.later()
    monkeypatch.delitem(sys.modules, "server")
    assert not session.later(), "ComfyUI's code without its server has no moments"


def test_the_status_says_how_many_sizes_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    left = "Performance: 2 sizes are still to be measured, when the next workflows begin."
    assert left not in status.text()
    monkeypatch.setattr(status.engine._measurer, "waiting", {1: None, 2: None})
    assert left in status.text().splitlines()
