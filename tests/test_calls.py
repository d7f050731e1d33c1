"""Calls from the same places: when their routes are kept, and when they are looked for anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lib_rocm_sd import calls as calls_module
from lib_rocm_sd.calls import MOST_FACTS, Places, Routes, begin
from lib_rocm_sd.engine import engine as engine_module
from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.engine.session import DEFAULT
from lib_rocm_sd.errors import LaunchError
from lib_rocm_sd.ops.base import Op
from tests.ops.toy_op import NO_GPU, SELF_TESTS, Doubler, Inputs, X, op_of, raising

Run = Callable[..., torch.Tensor]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """That of the process is one of the test's own."""
    own = Engine(identify=lambda device: NO_GPU, free=lambda device, headroom: 1 << 40)
    monkeypatch.setattr(calls_module, "engine", own)
    yield own


@pytest.fixture
def run(engine: Engine) -> Run:
    """x doubled from one place; the facts are the shape of x unless they are given."""
    places = Places()

    def doubled(op: Op[Any, Any], x: torch.Tensor, facts: Any = None) -> torch.Tensor:
        calls = begin(DEFAULT, places.of(x.shape if facts is None else facts))
        made: torch.Tensor = calls.run("here", op, Inputs(x))
        return made

    return doubled


def counting(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each time that the engine looks at inputs."""
    looked, key = [], engine._key

    def noted(*args: Any) -> Any:
        looked.append(1)
        return key(*args)

    monkeypatch.setattr(engine, "_key", noted)
    return looked


def test_inputs_are_looked_at_once(
    engine: Engine, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, op = counting(engine, monkeypatch), op_of(Doubler("only"))
    for factor in (1.0, 2.0, 3.0):
        assert torch.equal(run(op, factor * X), 2 * factor * X)
    assert len(looked) == 1
    assert torch.equal(run(op, X[:4]), 2 * X[:4])
    assert torch.equal(run(op, X), 2 * X)
    assert len(looked) == 2


def test_gradients_are_another_fact(
    engine: Engine, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, op = counting(engine, monkeypatch), op_of(Doubler("only"))
    run(op, X)
    with torch.no_grad():
        run(op, X)
    assert len(looked) == 2


@pytest.mark.parametrize("what", ["renew", "reset"])
def test_dropped_routes_are_not_followed(
    engine: Engine, run: Run, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, op = counting(engine, monkeypatch), op_of(Doubler("only"))
    run(op, X)
    getattr(engine, what)()
    assert torch.equal(run(op, X), 2 * X)
    assert len(looked) == 2


def test_a_variant_that_fails_is_replaced_for_good(engine: Engine, run: Run) -> None:
    broken: list[int] = []
    fails = raising(LaunchError("status 719"), 0)
    fragile = Doubler("fragile", 9, work=lambda x: fails(x) if broken else 2 * x)
    op = op_of(fragile, Doubler("solid"))
    run(op, X)
    broken.append(1)
    assert torch.equal(run(op, X), 2 * X)
    assert torch.equal(run(op, X), 2 * X)
    assert fragile.calls(10) == 2
    assert engine.drops == 2


def test_what_fails_everywhere_raises(engine: Engine, run: Run) -> None:
    op = op_of(Doubler("fragile", work=raising(LaunchError("status 719"), SELF_TESTS)))
    for _ in range(2):
        with pytest.raises(LaunchError, match="status 719"):
            run(op, X)


def test_a_makeshift_is_not_kept(engine: Engine, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a graph capture, in which nothing can be tested."""
    op = op_of(Doubler("ours", 9, ours=False), Doubler("torch"))
    monkeypatch.setattr(engine_module, "is_recording", lambda device: True)
    run(op, X)
    monkeypatch.setattr(engine_module, "is_recording", lambda device: False)
    looked = counting(engine, monkeypatch)
    run(op, X)
    run(op, X)
    assert len(looked) == 1


def test_few_facts_are_kept(engine: Engine) -> None:
    places = Places()
    kept = [places.of(number) for number in range(MOST_FACTS)]
    assert all(places.of(number) is routes for number, routes in enumerate(kept))
    places.of("one more")
    assert places.of(0) is not kept[0]
    first = places.of(0)
    places.forget()
    assert places.of(0) is not first


def test_autocast_has_no_say(engine: Engine) -> None:
    seen = []

    def work(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return 2 * x

    op = op_of(Doubler("only", work=work))
    with torch.autocast("cpu"):
        begin(DEFAULT, Routes()).run("here", op, Inputs(X))
        assert torch.is_autocast_enabled("cpu")
    assert seen[-1] is False


def test_a_callers_mistake_is_said_in_words(run: Run) -> None:
    with pytest.raises(ValueError, match=r"x must be \(rows, width\)"):
        run(op_of(Doubler("only")), torch.ones(3))
