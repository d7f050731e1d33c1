"""What becomes of a call whose variant fails: quarantine, fallback, pardon."""

from __future__ import annotations

import pytest
import torch

from lib_rocm_sd.engine import engine as engine_module
from lib_rocm_sd.engine import planner
from lib_rocm_sd.errors import LaunchError
from tests.ops.toy_op import (
    CPU,
    GFX1100,
    SELF_TESTS,
    Doubler,
    Doubling,
    Tile,
    X,
    engine_of,
    op_of,
    raising,
)


def test_a_variant_that_fails_at_run_time_is_quarantined_and_the_call_goes_on() -> None:
    engine, report = engine_of()
    fragile = Doubler("fragile", 9, work=raising(LaunchError("status 719"), SELF_TESTS))
    op = op_of(fragile, Doubler("solid"))
    assert torch.equal(engine.run(op, X), X * 2)
    assert torch.equal(engine.run(op, X), X * 2)
    assert fragile.calls(10) == 1
    (event,) = report.snapshot()["events"]
    assert "fragile is not used on cpu: failed: LaunchError: status 719" in event
    (row,) = report.snapshot()["rows"]
    assert (row["variant"], row["calls"]) == ("solid", 2)
    assert row["reasons"]["fragile"] == ["failed: LaunchError: status 719"]


def test_a_run_time_failure_bars_one_class_only() -> None:
    engine, _ = engine_of()

    def work(x: torch.Tensor) -> torch.Tensor:
        if x.shape == (10, 8):
            raise LaunchError("status 719")
        return x * 2

    fragile = Doubler("fragile", 9, work=work)
    op = op_of(fragile, Doubler("solid"))
    engine.run(op, X)
    engine.run(op, torch.ones(10, 16))
    assert fragile.calls(10) == 2
    engine.run(op, torch.ones(12, 8))
    assert fragile.calls(12) == 0


def test_where_all_fail_the_first_error_is_raised_and_nothing_stays_barred() -> None:
    engine, report = engine_of()
    broken = [True]

    def work(x: torch.Tensor) -> torch.Tensor:
        if broken[0] and x.shape[0] == 10:
            raise RuntimeError("an illegal memory access was encountered")
        return x * 2

    first, second = Doubler("first", 9, work=work), Doubler("second", work=work)
    op = op_of(first, second)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.run(op, X)
    assert (first.calls(10), second.calls(10)) == (1, 1)
    broken[0] = False
    engine.run(op, X)
    assert first.calls(10) == 2
    assert report.snapshot()["events"] == []


def test_out_of_memory_of_the_fallback_is_passed_on() -> None:
    engine, _ = engine_of()
    error = torch.cuda.OutOfMemoryError("HIP out of memory")
    op = op_of(
        Doubler("fragile", 9, work=raising(LaunchError("status 719"), SELF_TESTS)),
        Doubler("full", work=raising(error, SELF_TESTS)),
    )
    with pytest.raises(torch.cuda.OutOfMemoryError):
        engine.run(op, X)


def test_a_failure_within_a_graph_capture_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own is planned there, whether barred or not: it must not be tried for ever."""
    for module in (planner, engine_module):
        monkeypatch.setattr(module, "is_recording", lambda device: True)
    engine, report = engine_of(GFX1100)
    theirs = Doubler("theirs", work=raising(RuntimeError("not while it is captured")))
    with pytest.raises(RuntimeError, match="not while it is captured"):
        engine.run(op_of(theirs), X)
    assert len(theirs.seen) == 1
    assert report.snapshot()["events"] == []


def test_where_nothing_can_be_planned_after_a_fault_the_fault_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After an access outside of memory every call of the driver fails, also the planner's."""
    engine, _ = engine_of(GFX1100)
    faulty = Doubler(
        "faulty", 9, work=raising(RuntimeError("an illegal memory access"), SELF_TESTS)
    )
    op = op_of(faulty, Doubler("other"))

    def broken(device: torch.device) -> bool:
        if len(faulty.seen) > SELF_TESTS:
            raise RuntimeError("the driver is gone")
        return False

    for module in (planner, engine_module):
        monkeypatch.setattr(module, "is_recording", broken)
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        engine.run(op, X)
    assert len(faulty.seen) == SELF_TESTS + 1


def test_a_tuned_config_that_fails_later_gives_way_to_the_safe_one() -> None:
    engine, _ = engine_of(GFX1100)
    tiles = {Tile(1): raising(LaunchError("status 1"), SELF_TESTS), Tile(2): lambda x: x * 2}
    ours = Doubler("ours", 9, ours=True, tiles=tuple(tiles), by_tile=tiles, safe=Tile(2))
    op = op_of(ours, Doubler("theirs"))
    assert torch.equal(engine.run(op, X), X * 2)
    assert engine.plan(Doubling(10, 8), CPU, op).config == Tile(2)
