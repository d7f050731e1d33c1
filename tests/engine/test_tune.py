"""Performance: what is measured, stored and believed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib_rocm_sd import cache
from lib_rocm_sd.engine import measure as tune
from lib_rocm_sd.errors import LaunchError
from lib_rocm_sd.runtime import source
from tests.clock import Clock
from tests.ops.toy_op import (
    CPU,
    GFX1100,
    SELF_TESTS,
    Doubler,
    Doubling,
    Tile,
    engine_of,
    op_of,
    raising,
    taking,
)

pytestmark = pytest.mark.usefixtures("fresh_cache", "clock")


def test_performance_measures_configs_and_takes_the_fastest(clock: Clock) -> None:
    engine, _ = engine_of(GFX1100)
    engine.set_level("Performance")
    tiles = {
        Tile(1): taking(1.5e-2, clock),
        Tile(2): taking(1e-4, clock),
        Tile(3): taking(1e-2, clock),
    }
    ours = Doubler("ours", 9, ours=True, tiles=tuple(tiles), by_tile=tiles)
    op = op_of(ours, Doubler("theirs", work=taking(2e-2, clock)))
    plan = engine.plan(Doubling(10, 8), CPU, op)
    assert (plan.variant.name, plan.config) == ("ours", Tile(2))
    assert "measured" in plan.why


def test_performance_prefers_a_faster_variant_to_a_preferred_one(clock: Clock) -> None:
    engine, _ = engine_of()
    engine.set_level("Performance")
    op = op_of(
        Doubler("preferred", 9, work=taking(2e-2, clock)),
        Doubler("quick", work=taking(1e-4, clock)),
    )
    assert engine.plan(Doubling(10, 8), CPU, op).variant.name == "quick"


def test_a_wrong_config_is_never_timed_however_fast(clock: Clock) -> None:
    engine, report = engine_of(GFX1100)
    engine.set_level("Performance")
    tiles = {Tile(1): taking(1e-2, clock), Tile(2): lambda x: x * 3}
    ours = Doubler("ours", 9, ours=True, tiles=tuple(tiles), by_tile=tiles)
    op = op_of(ours, Doubler("theirs", work=taking(2e-2, clock)))
    plan = engine.plan(Doubling(10, 8), CPU, op)
    assert plan.config == Tile(1)
    assert [config for _, config, shape in ours.seen if shape[0] == 10] == [
        Tile(1) for _ in range(ours.calls(10))
    ]
    assert "self-test failed" in report.snapshot()["events"][0]


def test_measured_times_come_from_the_cache_in_the_next_process(clock: Clock) -> None:
    def run() -> tuple[int, Any]:
        engine, _ = engine_of(GFX1100)
        engine.set_level("Performance")
        tiles = {Tile(1): taking(1e-2, clock), Tile(2): taking(1e-4, clock)}
        ours = Doubler("ours", 9, ours=True, tiles=tuple(tiles), by_tile=tiles)
        plan = engine.plan(
            Doubling(10, 8), CPU, op_of(ours, Doubler("theirs", work=taking(2e-2, clock)))
        )
        return ours.calls(10), plan.config

    assert run()[0] > 0
    assert run() == (0, Tile(2))


def stored(content: bytes, clock: Clock) -> tuple[Any, list[str]]:
    """The plan made, and the events told, with this tuning file in the cache."""
    cache.write("tune", "gfx1100/doubling.json", content)
    engine, report = engine_of(GFX1100)
    engine.set_level("Performance")
    op = op_of(Doubler("ours", 9, ours=True), Doubler("theirs", work=taking(1e-2, clock)))
    return engine.plan(Doubling(10, 8), CPU, op), report.snapshot()["events"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"not json", "damaged"),
        (b"\xff\xfe\x00", "damaged"),
        (b"[1, 2]", "not one of ours"),
        (b'{"stamp": "x", "rows": 3}', "not one of ours"),
        (b'{"stamp": "another card", "rows": {}}', ""),
    ],
)
def test_a_damaged_or_foreign_tuning_file_is_measured_anew(
    content: bytes, words: str, clock: Clock
) -> None:
    plan, events = stored(content, clock)
    assert plan.variant.name == "ours"
    assert "measured" in plan.why
    assert [words in event for event in events] == ([True] if words else [])


@pytest.mark.parametrize(
    "entry",
    [
        '{"config": {"size": 7}, "time_us": 1.0}',
        '{"config": null, "time_us": -1.0}',
        '{"config": null, "time_us": NaN}',
        '{"config": null}',
        "3",
    ],
)
def test_a_damaged_tuning_entry_is_measured_anew(entry: str, clock: Clock) -> None:
    stamp = tune.stamp(GFX1100)
    rows = f'{{"{Doubling(10, 8)}": {{"ours": {entry}}}}}'
    plan, events = stored(f'{{"stamp": "{stamp}", "rows": {rows}}}'.encode(), clock)
    assert plan.variant.name == "ours"
    assert "measured" in plan.why
    assert "tuning entry of ours is ignored" in events[0]


def test_a_variant_that_fails_while_measured_is_not_chosen() -> None:
    engine, report = engine_of()
    engine.set_level("Performance")
    op = op_of(Doubler("fragile", 9, work=raising(LaunchError("status 1"), 3)), Doubler("solid"))
    assert engine.plan(Doubling(10, 8), CPU, op).variant.name == "solid"
    assert "status 1" in report.snapshot()["events"][0]


def test_too_little_memory_to_measure_one_variant_bars_nothing() -> None:
    engine, _ = engine_of()
    engine.set_level("Performance")
    error = torch.cuda.OutOfMemoryError("HIP out of memory")
    op = op_of(Doubler("full", 9, work=raising(error, SELF_TESTS)), Doubler("solid"))
    plan = engine.plan(Doubling(10, 8), CPU, op)
    assert plan.variant.name == "solid"
    assert plan.refusals == {"full": ["comes after solid"]}


def test_measuring_stays_within_its_budget(clock: Clock) -> None:
    op = op_of(Doubler("slow", work=taking(0.02, clock)), Doubler("quick"))
    contenders = [tune.Contender(variant, None, None) for variant in op.variants]
    times, failures = tune.measure(op, Doubling(10, 8), CPU, contenders, budget_s=0.2)
    assert clock.now_s <= 0.2
    assert failures == []
    assert times["slow"].time_us == pytest.approx(20_000)
    assert times["quick"].time_us == tune.LEAST_US


def test_every_configs_time_is_kept(clock: Clock) -> None:
    engine, _ = engine_of(GFX1100)
    engine.set_level("Performance")
    tiles = {Tile(1): taking(1e-2, clock), Tile(2): taking(1e-4, clock), Tile(3): lambda x: x * 3}
    ours = Doubler("ours", 9, ours=True, tiles=tuple(tiles), by_tile=tiles)
    op = op_of(ours)
    engine.plan(Doubling(10, 8), CPU, op)
    times, reason = tune.load(op, GFX1100, Doubling(10, 8))
    assert not reason and times["ours"].config == Tile(2)
    each = dict(times["ours"].each)
    assert each == pytest.approx({Tile(1): 10_000, Tile(2): 100})  # the third is wrong
    assert tune.stored_problems(op, GFX1100) == [str(Doubling(10, 8))]


@pytest.mark.parametrize("time_us", [float("nan"), float("inf")])
def test_an_impossible_time_is_a_failure(monkeypatch: pytest.MonkeyPatch, time_us: float) -> None:
    op = op_of(Doubler("odd"), Doubler("good"))
    found = {"odd": time_us, "good": 0.0}
    monkeypatch.setattr(tune, "_time_us", lambda contender, *rest: found[contender.variant.name])
    contenders = [tune.Contender(variant, None, None) for variant in op.variants]
    times, failures = tune.measure(op, Doubling(10, 8), CPU, contenders)
    assert times.keys() == {"good"} and times["good"].time_us == tune.LEAST_US
    assert [(contender.variant.name, str(error)) for contender, error in failures] == [
        ("odd", f"its time came out as {time_us}")
    ]


def test_other_kernels_are_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> int:
        engine, _ = engine_of(GFX1100)
        engine.set_level("Performance")
        ours = Doubler("ours", 9, ours=True)
        engine.plan(Doubling(10, 8), CPU, op_of(ours, Doubler("theirs")))
        return ours.calls(10)

    assert run() > 0 and run() == 0
    monkeypatch.setattr(source, "digest", lambda: "0" * 64)
    assert run() > 0


def test_an_interrupted_measurement_leaves_nothing_half_done(clock: Clock) -> None:
    def interrupted(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 10:
            raise KeyboardInterrupt
        return x * 2

    engine, _ = engine_of(GFX1100)
    engine.set_level("Performance")
    tiles = {Tile(1): taking(1e-4, clock), Tile(2): interrupted}
    ours = Doubler("ours", 9, ours=True, tiles=tuple(tiles), by_tile=tiles)
    op = op_of(ours, Doubler("theirs", work=taking(1e-2, clock)))
    with pytest.raises(KeyboardInterrupt):
        engine.plan(Doubling(10, 8), CPU, op)
    assert tune.load(op, GFX1100, Doubling(10, 8)) == ({}, "")
    ours.by_tile = {}
    assert "measured" in engine.plan(Doubling(10, 8), CPU, op).why
    assert dict(tune.load(op, GFX1100, Doubling(10, 8))[0]["ours"].each).keys() == set(tiles)
