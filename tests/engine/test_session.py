"""Sessions beside one another, keys that hold the whole problem, and measuring without a lock."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd import functional
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.errors import LaunchError
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import Band, ConvProblem
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.report import Report
from tests.ops.toy_op import (
    CPU,
    GFX1100,
    SELF_TESTS,
    Doubler,
    Doubling,
    Tile,
    User,
    X,
    engine_of,
    op_of,
    raising,
)


def test_two_sessions_do_not_disturb_one_another() -> None:
    engine, _ = engine_of(free=1000)
    auto, frugal = User(engine.engine), User(engine.engine, "Memory")
    fast, small = Doubler("fast", 9, workspace_bytes=10), Doubler("small", 1)
    op = op_of(fast, small)
    for _ in range(3):
        auto.run(op, X)
        frugal.run(op, X)
    assert (fast.calls(10), small.calls(10)) == (3, 3)
    assert [row["variant"] for row in auto.session.report.snapshot()["rows"]] == ["fast"]
    assert [row["variant"] for row in frugal.session.report.snapshot()["rows"]] == ["small"]
    assert len(fast.seen) == 3 + SELF_TESTS, "what was tested is a fact about the device"


def test_a_session_leaves_its_own_headroom() -> None:
    asked: list[int] = []

    def free(device: torch.device, headroom_bytes: int) -> int:
        asked.append(headroom_bytes)
        return 1000 - headroom_bytes

    engine = engine_of()[0].engine
    engine._new_planner = lambda: type(engine._planner)(  # type: ignore[method-assign]
        engine._planner.identify, engine._planner._launcher, free
    )
    engine.reset()
    op = op_of(Doubler("greedy", 9, workspace_bytes=400), Doubler("modest", 1))
    for headroom_bytes, runs in ((0, "greedy"), (300, "modest"), (0, "greedy")):
        session = Session.of("Auto", headroom_bytes, Report())
        assert engine.plan(Doubling(10, 8), CPU, op, session).variant.name == runs
    assert asked == [0, 300, 0]


def norm_inputs(groups: int) -> tuple[Any, ...]:
    return torch.randn(1, 16, 6, 5), None, None, groups


def test_a_wrong_number_of_groups_on_a_warm_key_is_the_callers_mistake() -> None:
    right = functional.group_norm_silu(*norm_inputs(4))
    assert right.shape == (1, 16, 6, 5)
    with pytest.raises(ValueError, match="16 channels do not divide into 3 groups"):
        functional.group_norm_silu(*norm_inputs(3))
    x = torch.randn(1, 16, 6, 5)
    expected = torch.nn.functional.silu(torch.nn.functional.group_norm(x, 4))
    assert torch.allclose(functional.group_norm_silu(x, None, None, 4), expected, atol=1e-5)


def test_a_convolutions_key_holds_all_that_its_problem_depends_on() -> None:
    problem = ConvProblem("3x3", 1, 8, 8, 16, 32, "float16", True, "conv", 16, True)
    op = CONVS["3x3"]
    inputs = op.make_inputs(problem, CPU, 1)
    assert inputs.next_norm is not None and inputs.shortcut is not None
    assert inputs.weights.shortcut_weight is not None
    plain = ConvWeights(inputs.weights.weight)
    others = [
        inputs._replace(next_norm=replace(inputs.next_norm, groups=4)),
        inputs._replace(next_norm=None),
        inputs._replace(weights=plain, shortcut=None),
        inputs._replace(weights=ConvWeights(inputs.weights.weight[:16]), next_norm=None),
        inputs._replace(next_norm=None, shortcut=None),
        inputs._replace(band=Band(1, 4), x=inputs.x[:, :6], shortcut=inputs.shortcut[:, :4]),
        inputs._replace(norm=None),
    ]
    keys = [op.key_of(each) for each in (inputs, *others)]
    assert len(set(keys)) == len(keys)
    wrong = inputs._replace(next_norm=replace(inputs.next_norm, groups=5))
    with pytest.raises(ValueError, match="32 channels do not divide into the next norm's 5 groups"):
        functional.engine.run(op, wrong)


@pytest.mark.parametrize("bad", [None, "meta", "sparse"])
def test_what_is_no_dense_tensor_is_a_callers_mistake(bad: Any) -> None:
    q = torch.randn(1, 4, 2, 8)
    other = {None: None, "meta": q.to("meta"), "sparse": q.to_sparse()}[bad]
    said = {None: "not NoneType", "meta": "meta device", "sparse": "not dense"}[bad]
    with pytest.raises(ValueError, match=said):
        functional.attention(q, other, q)  # type: ignore[arg-type]
    image = {None: None, "meta": q.to("meta"), "sparse": q.to_sparse()}[bad]
    with pytest.raises(ValueError, match=said):
        functional.group_norm_silu(image, None, None, 2)  # type: ignore[arg-type]
    weights = ConvWeights(torch.randn(16, 16, 3, 3))
    x = torch.randn(1, 4, 4, 16)
    wrong = {None: None, "meta": x.to("meta"), "sparse": x.to_sparse()}[bad]
    with pytest.raises(ValueError, match=said):
        functional.conv("3x3", wrong, weights)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error", [ValueError("a caller's mistake"), KeyboardInterrupt(), MemoryError("out of memory")]
)
def test_nothing_stays_barred_where_no_other_variant_did_the_work(error: BaseException) -> None:
    engine, report = engine_of()
    fragile = Doubler("fragile", 9, work=raising(LaunchError("status 719"), SELF_TESTS))
    op = op_of(fragile, Doubler("other", work=raising(error, SELF_TESTS)))
    with pytest.raises(type(error)):
        engine.run(op, X)
    fragile.work = lambda x: x * 2
    assert torch.equal(engine.run(op, X), X * 2)
    assert fragile.calls(10) == 2 and report.snapshot()["events"] == []


@pytest.mark.usefixtures("fresh_cache", "brief_tuning")
def test_measuring_holds_no_lock_and_others_do_not_wait_for_it() -> None:
    engine, _ = engine_of(GFX1100)
    engine.set_level("Performance")
    timed, go_on = threading.Event(), threading.Event()

    def slow(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 10:
            timed.set()
            assert go_on.wait(600)
        return x * 2

    measured = op_of(Doubler("ours", 9, ours=True, work=slow), Doubler("theirs"))
    thread = threading.Thread(target=lambda: engine.plan(Doubling(10, 8), CPU, measured))
    thread.start()
    assert timed.wait(600)
    try:
        other = op_of(Doubler("ours", 9, ours=True), Doubler("theirs"), name="other")
        assert torch.equal(engine.run(other, X), X * 2)
        assert not engine._routes, "planned without times, so only for this call"
    finally:
        go_on.set()
        thread.join()
    engine.run(other, X)
    assert len(engine._routes) == 1


@pytest.mark.usefixtures("fresh_cache", "brief_tuning")
def test_interrupting_ends_measuring_and_the_picture_goes_on() -> None:
    told: list[str] = []
    stop = [False]

    def progress(message: str) -> None:
        told.append(message)
        stop[0] = len(told) == 2

    session = replace(
        Session.of("Performance", report=Report()), progress=progress, interrupt=lambda: stop[0]
    )
    engine, _ = engine_of(GFX1100)
    tiles = {Tile(size): (lambda x: x * 2) for size in (1, 2, 3)}
    ours = Doubler("ours", 9, ours=True, tiles=tuple(tiles), by_tile=tiles)
    op = op_of(ours, Doubler("theirs"))
    inputs = op.make_inputs(Doubling(10, 8), CPU, 1)
    assert torch.equal(engine.engine.run(op, inputs, session), inputs.x * 2)
    assert told == ["testing doubling, 1 of 3", "testing doubling, 2 of 3"]
    assert {config for _, config, shape in ours.seen if shape[0] == 10} == {Tile(1)}
    stop[0] = False
    told.clear()
    plan = engine.engine.plan(Doubling(10, 8), CPU, op, session)
    assert "measured" not in plan.why and len(told) == 2
    stop[0] = False
    told.append("what is told from here on stops nothing")
    assert "measured" in engine.engine.plan(Doubling(10, 8), CPU, op, session).why
