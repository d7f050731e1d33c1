"""Calls of the engine as ranges: their names, and that nothing is left of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib_rocm_sd import ranges
from tests.ops.toy_op import Doubler, X, engine_of, op_of


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names as nvtx would have them on a machine with a GPU; "<" is an end."""
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", found.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: found.append("<"))
    return found


def test_a_call_is_a_range_of_its_op_problem_and_variant(opened: list[str]) -> None:
    user, _ = engine_of()
    op = op_of(Doubler("plain"))
    engine = user.engine
    with ranges.ranges(engine), torch.profiler.profile() as profile:
        assert torch.equal(user.run(op, X), X * 2)
        route = engine.route(op, op.make_inputs(op.usual[0][1], X.device, 0), user.session)
        engine.follow(route, op, op.make_inputs(op.usual[0][1], X.device, 0), user.session)
    begin, end = "rocm_sd | toy | doubling: Doubling(rows=", ", width=8, dtype='float32') | plain"
    names = [f"{begin}{rows}{end}" for rows in (10, 40)]
    assert opened == [names[0], "<", names[1], "<"]
    found = {event.name: event for event in profile.events()}
    assert set(names) <= found.keys()
    # torch.profiler counts kernels to operators, and to no annotation
    assert not any(found[name].is_user_annotation for name in names)
    assert ranges.read_name(names[0]) == ("toy", names[0].split(" | ")[2], "plain")


def test_outside_a_call_is_untouched(opened: list[str]) -> None:
    user, _ = engine_of()
    op, engine = op_of(Doubler("plain")), user.engine
    with ranges.ranges(engine):
        with ranges.ranges(engine):
            user.run(op, X)
        user.run(op, X)
        assert len(opened) == 4  # one range a call, however often it was asked for
    assert "follow" not in vars(engine)
    user.run(op, X)
    assert len(opened) == 4


def test_a_range_ends_with_an_error(opened: list[str]) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("a caller's mistake")

    user, _ = engine_of()
    doubler = Doubler("broken")
    op = op_of(doubler)
    user.run(op, X)
    doubler.work = broken
    with pytest.raises(ValueError, match="mistake"), ranges.ranges(user.engine):
        user.run(op, X)
    assert opened[-1] == "<" and len(opened) == 2
    assert "follow" not in vars(user.engine)


@pytest.mark.parametrize("name", ["aten::mm", "rocm_sd", "rocm_sd | a | b", "x | a | b | c"])
def test_other_names_are_not_ours(name: str) -> None:
    assert ranges.read_name(name) is None


def test_without_a_gpu_nvtx_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(name: Any) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", unexpected)
    with ranges.named("something"):
        pass
