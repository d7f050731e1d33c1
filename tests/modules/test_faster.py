"""Whole models are the host's where ours is slower: by played times, which nobody waits for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd import cache
from lib_rocm_sd.modules import faster
from lib_rocm_sd.modules.faster import SETTLING, TIMED, Contest, Verdict

OURS, THEIRS = SETTLING[True] + TIMED, SETTLING[False] + TIMED
X = torch.zeros(2, 4, 8, 8)
pytestmark = pytest.mark.usefixtures("fresh_cache")


@dataclass
class Card:
    """Plays a card and its engine: how long calls take, by whether they are ours; when their times
    arrive; and whether kernels are being tried.
    """

    ours_ms: float = 2.0
    theirs_ms: float = 3.0
    late: int = 1
    """Calls after which a time is there."""
    drops: int = 0
    trying: bool = False
    calls: int = 0
    timed: list[bool] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    seen: list[bool] = field(default_factory=list)
    """Whether ours was in the model, by call."""
    model: nn.Module = field(default_factory=lambda: nn.Sequential(nn.Linear(2, 2)))
    ours: bool = True
    cold: int = 0
    """Calls that take ten times as long, from the first on."""
    noise: Callable[[int], float] = lambda number: 0.0

    def contest(self) -> Contest:
        self.ours = True

        def switch(ours: bool) -> None:
            assert ours != self.ours
            self.ours = ours

        return Contest(self.model, switch, lambda: "all of it", self.told.append)

    def begin(self, device: torch.device) -> Callable[[], Callable[[], float | None]]:
        self.timed.append(self.ours)
        ms = self.ours_ms if self.ours else self.theirs_ms
        ms = ms * (10 if self.calls < self.cold else 1) + self.noise(self.calls)
        due = self.calls + self.late
        return lambda: lambda: ms if self.calls >= due else None

    def run(self, contest: Contest, count: int = 1, x: torch.Tensor = X, **more: Any) -> None:
        def compute() -> str:
            self.seen.append(self.ours)
            self.calls += 1
            return "made"

        with torch.no_grad():
            for _ in range(count):
                assert contest.call((), {"sample": x, **more}, compute) == "made"

    def launcher(self, device: torch.device) -> None:
        """As the engine of a machine without a driver."""

    @property
    def gate(self) -> Any:
        return SimpleNamespace(state=lambda: SimpleNamespace(running=self.trying))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card()
    monkeypatch.setattr(faster, "is_card", lambda device: True)
    monkeypatch.setattr(faster, "begin", made.begin)
    monkeypatch.setattr(faster, "engine", made)
    return made


def turns(seen: list[bool]) -> list[tuple[bool, int]]:
    """Who computed, and how many calls."""
    found: list[tuple[bool, int]] = []
    for each in seen:
        if found and found[-1][0] == each:
            found[-1] = each, found[-1][1] + 1
        else:
            found.append((each, 1))
    return found


def test_ours_that_is_faster_has_all_calls_but_one_turn(card: Card) -> None:
    contest = card.contest()
    card.run(contest, 60)
    assert turns(card.seen) == [(True, 1 + OURS), (False, THEIRS), (True, 59 - OURS - THEIRS)]
    assert not card.told and not contest.slower
    assert card.timed == [True] * TIMED + [False] * TIMED


def test_ours_that_is_slower_twice_is_left(card: Card) -> None:
    card.ours_ms = 9.9
    contest = card.contest()
    card.run(contest, 80)
    expected = [(True, 1 + OURS), (False, THEIRS), (True, OURS)]
    assert turns(card.seen)[:3] == expected and len(turns(card.seen)) == 4
    assert card.told == ["Sequential: the host's own is faster here, 3.0 ms for 9.9"]
    assert contest.slower == ["the host's own is faster here, 3.0 ms for 9.9"]


def test_a_card_that_wakes_up_is_no_reason_against_ours(card: Card) -> None:
    card.cold = OURS
    contest = card.contest()
    card.run(contest, 80)
    assert [whose for whose, _ in turns(card.seen)] == [True, False, True, False, True]
    assert not contest.slower and card.ours


def test_little_is_no_reason_against_ours(card: Card) -> None:
    card.ours_ms = 3.08
    card.run(card.contest(), 60)
    assert card.ours and not card.told


def test_what_varies_as_much_is_no_reason_against_ours(card: Card) -> None:
    card.ours_ms, card.noise = 3.5, lambda number: number % 3
    card.run(card.contest(), 80)
    assert card.ours and not card.told


def test_a_verdict_is_kept(card: Card) -> None:
    card.ours_ms = 9.0
    card.run(card.contest(), 80)
    card.seen, card.told = [], []
    card.run(card.contest(), 3)
    assert card.seen == [False] * 3 and len(card.timed) == 4 * TIMED
    assert card.told == ["Sequential: the host's own is faster here, 3.0 ms for 9.0"]


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"stamp": "another", "rows": {}}', b"\xff"])
def test_a_file_that_is_damaged_or_old_is_none(card: Card, content: bytes) -> None:
    card.ours_ms = 9.0
    card.run(card.contest(), 80)
    (key,) = (key for key in cache.keys("tune") if "models" in key)
    document = json.loads(cache.read("tune", f"cpu/{faster.FILE}") or b"")
    assert len(document["rows"]) == 1 and key
    cache.write("tune", f"cpu/{faster.FILE}", content)
    card.seen = []
    card.run(card.contest(), 3)
    assert card.seen == [True] * 3


def test_nothing_is_timed_while_kernels_are_tried_or_plans_change(card: Card) -> None:
    card.trying = True
    contest = card.contest()
    card.run(contest, 50)
    assert card.seen == [True] * 50 and not card.timed
    card.trying = False
    for _ in range(10):  # a plan is another in each
        card.drops += 1
        card.run(contest, 4)
    assert all(card.seen) and not card.timed
    card.run(contest, 60)
    assert turns(card.seen)[1] == (False, THEIRS) and card.ours


def test_times_that_are_late_are_waited_for_without_a_stop(card: Card) -> None:
    card.late, card.ours_ms = 30, 9.0
    contest = card.contest()
    card.run(contest, 200)
    assert contest.slower and not card.ours


def test_each_size_has_its_own_verdict(card: Card) -> None:
    card.ours_ms = 9.0
    contest = card.contest()
    card.run(contest, 80)
    card.ours_ms, large = 1.0, torch.zeros(2, 4, 16, 16)
    card.run(contest, 60, large)
    card.seen = []
    for _ in range(3):
        card.run(contest)
        card.run(contest, 1, large)
    assert card.seen == [False, True] * 3


def test_two_kinds_in_turns_are_measured_one_after_the_other(card: Card) -> None:
    """As a step with a ControlNet and one without: none of them is switched for the other."""
    contest = card.contest()
    for _ in range(60):
        card.run(contest)
        card.run(contest, mask=X)
    assert len(turns(card.seen)) == 5 and card.ours


def test_a_kind_that_comes_no_more_does_not_keep_the_host_computing(card: Card) -> None:
    contest = card.contest()
    card.run(contest, OURS + 2)
    assert not card.seen[-1]
    card.run(contest, 80, torch.zeros(1, 4, 8, 8))
    assert card.ours


def test_a_changed_model_is_measured_anew(card: Card) -> None:
    card.ours_ms = 9.0
    contest = card.contest()
    card.run(contest, 80)
    card.model.add_module("more", nn.LayerNorm(2))
    card.ours_ms = 1.0
    card.run(contest, 80)
    assert card.ours and not contest.slower


def test_what_is_not_for_a_contest_is_computed_as_it_comes(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    contest = card.contest()
    assert contest.call((X,), {}, lambda: "with gradients") == "with gradients"
    with torch.no_grad():
        assert contest.call((), {"x": X}, lambda: "unknown") == "unknown"
        monkeypatch.setattr(faster, "is_card", lambda device: False)
        assert contest.call((X,), {}, lambda: "no card") == "no card"
    assert not contest._kinds


def test_who_measures_ours_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faster.VARIABLE, "1")
    with faster.ours_whatever():
        assert not faster.is_wanted()
    assert faster.is_wanted()


def test_no_switch_after_the_end(card: Card) -> None:
    contest = card.contest()
    card.run(contest, OURS)
    contest.end()
    card.run(contest, 40)
    assert all(card.seen)


def test_an_error_of_the_model_is_passed_on_and_not_timed(card: Card) -> None:
    contest = card.contest()
    card.run(contest, SETTLING[True] + 1)

    def fails() -> None:
        raise InterruptedError

    with torch.no_grad(), pytest.raises(InterruptedError):
        contest.call((), {"sample": X}, fails)
    card.run(contest, 60)
    assert card.ours and not card.told


@pytest.mark.parametrize(
    ("ours", "theirs", "is_ours"),
    [
        ([5.0] * 5, [4.0] * 5, False),
        ([4.1] * 5, [4.0] * 5, True),
        ([1, 5, 5, 5, 9], [4.0] * 5, False),
    ],
)
def test_the_verdict(ours: list[float], theirs: list[float], is_ours: bool) -> None:
    assert Verdict.of(ours, theirs).ours is is_ours
