"""Ranking by the three levels."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from lib_rocm_sd.policy import (
    AUTO,
    LEVELS,
    MEMORY,
    PERFORMANCE,
    Candidate,
    Policy,
    by_name,
    limit,
    rank,
)

MIB = 1 << 20


def candidate(
    name: str,
    preference: int = 0,
    workspace_mib: int = 0,
    time_us: float | None = None,
    **more: Any,
) -> Candidate:
    variant = SimpleNamespace(name=name, preference=preference)
    return Candidate(variant, lambda: workspace_mib * MIB, time_us, **more)


def names(ranked: Iterable[Candidate]) -> list[str]:
    return [item.variant.name for item in ranked]


def test_auto_takes_the_highest_preference() -> None:
    found = rank(AUTO, [candidate("low", 1), candidate("high", 9), candidate("mid", 5)], MIB)
    assert names(found) == ["high", "mid", "low"]


def test_a_preference_for_this_device_is_taken_in_place_of_the_variants() -> None:
    library, ours = candidate("library", 5), SimpleNamespace(name="ours", preference=9)
    found = [Candidate(ours, int), library]
    assert names(rank(AUTO, found, MIB)) == ["ours", "library"]
    found = [Candidate(ours, int, preference=1), library]
    assert names(rank(AUTO, found, MIB)) == ["library", "ours"]
    assert names(rank(MEMORY, found, MIB)) == ["library", "ours"]


def test_auto_puts_what_needs_more_than_half_of_the_free_memory_last_by_workspace() -> None:
    items = [
        candidate("huge", 9, 900),
        candidate("large", 5, 600),
        candidate("half", 3, 500),
        candidate("none", 1, 0),
    ]
    assert names(rank(AUTO, items, 1000 * MIB)) == ["half", "none", "large", "huge"]
    assert limit(AUTO, items[0], 1000 * MIB) == [
        "needs 900 MiB of workspace; Auto allows 500 MiB now"
    ]
    assert limit(AUTO, items[2], 1000 * MIB) == []


def test_nobody_is_asked_before_its_turn_comes() -> None:
    asked = []

    def asking(name: str, preference: int, can: bool = True) -> Candidate:
        def told(what: Any) -> Any:
            asked.append(name)
            return what

        variant = SimpleNamespace(name=name, preference=preference)
        return Candidate(variant, lambda: told(MIB), can=lambda: told(can))

    items = [asking("last", 1), asking("no", 9, can=False), asking("first", 5)]
    ranked = rank(AUTO, items, 1000 * MIB)
    assert next(ranked).variant.name == "first"
    assert asked == ["no", "first", "first"]
    assert names(ranked) == ["last"]
    assert limit(AUTO, items[2], 1000 * MIB) == []
    assert asked == ["no", "first", "first", "last", "last"]


@pytest.mark.parametrize("policy", LEVELS.values(), ids=LEVELS)
def test_what_refuses_is_left_out(policy: Policy) -> None:
    items = [candidate("no", 9, can=lambda: False), candidate("yes", 1)]
    assert names(rank(policy, items, MIB)) == ["yes"]


def test_auto_ignores_measured_times() -> None:
    items = [candidate("fast", 1, 0, 1.0), candidate("preferred", 2, 0, 9.0)]
    assert names(rank(AUTO, items, MIB)) == ["preferred", "fast"]


def test_memory_takes_the_least_workspace_then_preference() -> None:
    items = [candidate("big", 9, 10), candidate("small", 1, 1), candidate("also small", 2, 1)]
    assert names(rank(MEMORY, items, 1 << 62)) == ["also small", "small", "big"]


def test_performance_takes_the_least_time_and_the_unmeasured_last() -> None:
    items = [
        candidate("unmeasured", 99),
        candidate("slow", 50, 0, 20.0),
        candidate("fast", 1, 900, 10.0),
    ]
    assert names(rank(PERFORMANCE, items, MIB)) == ["fast", "slow", "unmeasured"]


def test_equals_keep_their_order() -> None:
    items = [candidate(name) for name in "abc"]
    for policy in LEVELS.values():
        assert names(rank(policy, items, MIB)) == ["a", "b", "c"]


def test_levels_are_found_by_name_and_nothing_else_is() -> None:
    assert by_name("Memory") is MEMORY
    with pytest.raises(ValueError, match="'Turbo': there are Auto, Performance, Memory"):
        by_name("Turbo")
