"""Whole models are the host's where ours is slower: by played times, a picture at a time."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd import cache
from lib_rocm_sd.device import identify
from lib_rocm_sd.modules import faster
from lib_rocm_sd.modules.faster import PAIRS, SETTLING, TIMED, Contest, Verdict

X, LARGE = torch.zeros(2, 4, 8, 8), torch.zeros(2, 4, 16, 16)
STEPS = SETTLING[True] + TIMED + 1
WHY = "torch's attention is faster here, 3.0 ms for 9.9"
pytestmark = pytest.mark.usefixtures("fresh_cache")


@dataclass
class Card:
    """Plays a card and its engine: how long calls take, by whether they are ours, and whether
    kernels are being tried.
    """

    ours_ms: float = 2.0
    theirs_ms: float = 3.0
    drops: int = 0
    unmeasured: int = 0
    trying: bool = False
    calls: int = 0
    timed: list[bool] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    seen: list[list[bool]] = field(default_factory=list)
    """Whether ours was in the model, by picture and call."""
    model: nn.Module = field(default_factory=lambda: nn.Sequential(nn.Linear(2, 2)))
    ours: bool = True
    setting: str | None = "Auto"
    cold: int = 0
    """Calls that take ten times as long, from the first on."""
    noise: Callable[[int], float] = lambda number: 0.0

    def contest(self) -> Contest:
        self.ours = True
        theirs = "torch's attention"
        return Contest(self.model, self.switch, lambda: self.setting, theirs, self.told.append)

    def switch(self, ours: bool) -> None:
        assert ours != self.ours
        self.ours = ours

    def begin(self, device: torch.device) -> Callable[[], Callable[[], float]]:
        self.timed.append(self.ours)
        ms = self.ours_ms if self.ours else self.theirs_ms
        ms = ms * (10 if self.calls < self.cold else 1) + self.noise(self.calls)
        return lambda: lambda: ms

    def call(self, contest: Contest, picture: object, x: torch.Tensor = X, **more: Any) -> None:
        with torch.no_grad():
            after = contest.before(picture, (), {"sample": x, **more})
        self.seen[-1].append(self.ours)
        self.calls += 1
        after(True)

    def picture(self, contest: Contest, *given: torch.Tensor, steps: int = STEPS) -> None:
        """In each step a call for each of `given`."""
        self.seen.append([])
        token = object()
        for _ in range(steps):
            for x in given or (X,):
                self.call(contest, token, x)

    def pictures(self, contest: Contest, count: int, *given: torch.Tensor) -> list[bool]:
        """Who made each of them: it is never both."""
        first = len(self.seen)
        for _ in range(count):
            self.picture(contest, *given)
        made = [set(calls) for calls in self.seen[first:]]
        assert all(len(each) == 1 for each in made)
        return [each.pop() for each in made]

    def launcher(self, device: torch.device) -> None:
        """As the engine of a machine without a driver."""

    @property
    def gate(self) -> Any:
        return SimpleNamespace(state=lambda: SimpleNamespace(running=self.trying))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card()
    monkeypatch.setattr(faster, "is_compared_on", lambda device: True)
    monkeypatch.setattr(faster, "begin", made.begin)
    monkeypatch.setattr(faster, "engine", made)
    monkeypatch.setattr(faster, "_kinds", {})
    return made


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process begins."""
    monkeypatch.setattr(faster, "_kinds", {})


def test_ours_that_is_faster_makes_all_pictures_but_one(card: Card) -> None:
    assert card.pictures(card.contest(), 6) == [True, False, True, True, True, True]
    assert not card.told and card.timed == [True] * TIMED + [False] * TIMED


def test_ours_that_is_slower_twice_is_left(card: Card) -> None:
    card.ours_ms = 9.9
    contest = card.contest()
    assert card.pictures(contest, 6) == [True, False] * PAIRS + [False, False]
    assert card.told == [WHY] == contest.slower and contest.why_theirs == WHY
    assert TIMED >= 3 and card.timed == ([True] * TIMED + [False] * TIMED) * PAIRS


def test_calls_after_a_switch_do_not_count(card: Card) -> None:
    """As of a card on which they take long, since weights are laid and launches recorded."""
    contest, early = card.contest(), SETTLING[True]
    card.noise = lambda number: 100.0 if number % STEPS < early and card.ours else 0.0
    card.pictures(contest, 4)
    assert not card.told and card.ours


def test_a_card_that_wakes_up_is_no_reason_against_ours(card: Card) -> None:
    card.cold = STEPS
    assert card.pictures(card.contest(), 6) == [True, False, True, False, True, True]
    assert not card.told


def test_little_is_no_reason_against_ours(card: Card) -> None:
    card.ours_ms = 3.08
    card.pictures(card.contest(), 6)
    assert card.ours and not card.told


@pytest.mark.parametrize(("ours_ms", "is_ours"), [(3.0, True), (3.05, True), (3.5, False)])
def test_noise_decides_nothing(card: Card, ours_ms: float, is_ours: bool) -> None:
    card.ours_ms, card.noise = ours_ms, lambda number: (0, 1, 2, 1, 2)[number % 5]
    card.pictures(card.contest(), 6)
    assert card.ours is is_ours and bool(card.told) is not is_ours


def test_pictures_of_few_steps_are_timed_together(card: Card) -> None:
    card.ours_ms, contest = 9.9, card.contest()
    for _ in range(2 * PAIRS * (SETTLING[True] + TIMED) + 1):
        card.picture(contest, steps=1)
    assert contest.slower and not card.ours
    card.ours_ms, seen = 1.0, len(card.seen)
    for _ in range(SETTLING[True] + SETTLING[False] + 2 * TIMED + 1):
        card.picture(contest, LARGE, steps=2)
    assert card.seen[-1] == [True, True]
    assert any(False in calls for calls in card.seen[seen:])


def test_a_verdict_is_kept(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    card.ours_ms = 9.9
    card.pictures(card.contest(), 5)
    card.told, timed = [], len(card.timed)
    assert card.pictures(card.contest(), 2) == [False, False] and card.told == [WHY]
    forget(monkeypatch)
    assert card.pictures(card.contest(), 2) == [False, False] and len(card.timed) == timed
    (row,) = faster.verdicts(identify(X.device)).items()
    assert row[0].startswith("Sequential ") and row[1] == Verdict(9.9, 3.0, False)


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"stamp": "another", "rows": {}}', b'{"rows": [1]}', b"\xff"]
)
def test_a_file_that_is_damaged_or_old_is_none(
    card: Card, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    card.ours_ms = 9.9
    card.pictures(card.contest(), 5)
    document = json.loads(cache.read("tune", f"cpu/{faster.FILE}") or b"")
    assert len(document["rows"]) == 1
    cache.write("tune", f"cpu/{faster.FILE}", content)
    forget(monkeypatch)
    assert card.pictures(card.contest(), 1) == [True] and not faster.verdicts(identify(X.device))


def test_a_model_that_comes_again_goes_on(card: Card) -> None:
    """As in a `with` block for each picture, or with a refiner."""
    assert [card.pictures(card.contest(), 1) for _ in range(3)] == [[True], [False], [True]]


@pytest.mark.parametrize("busy", ["trying", "unmeasured", "compiling"])
def test_nothing_is_timed_before_plans_are_as_they_stay(
    card: Card, busy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = SimpleNamespace(running=busy == "compiling")
    monkeypatch.setattr(faster, "background", SimpleNamespace(state=lambda: state))
    card.trying, card.unmeasured = busy == "trying", busy == "unmeasured"
    contest = card.contest()
    assert all(card.pictures(contest, 3)) and not card.timed
    state.running = card.trying = card.unmeasured = False
    assert card.pictures(contest, 3) == [True, False, True]


def test_times_of_other_plans_do_not_count(card: Card) -> None:
    contest = card.contest()
    for _ in range(3):
        assert card.pictures(contest, 1) == [True]
        card.drops += 1
    assert card.pictures(contest, 2) == [True, False]
    card.drops += 1
    assert card.pictures(contest, 3) == [True, False, True]


def test_plans_that_change_amid_the_hosts_picture_end_it_at_last(card: Card) -> None:
    """The host does not go on being timed for ever."""
    contest, made = card.contest(), []
    for _ in range(12):
        made += card.pictures(contest, 1)
        card.drops += not made[-1]
    assert made.count(False) == faster.DISTURBED and all(made[-3:])


def test_each_size_has_its_own_verdict(card: Card) -> None:
    card.ours_ms = 9.9
    contest = card.contest()
    card.pictures(contest, 5)
    card.ours_ms = 1.0
    card.pictures(contest, 3, LARGE)
    assert card.pictures(contest, 1) == [False] and card.pictures(contest, 1, LARGE) == [True]
    assert card.pictures(contest, 1) == [False]


def test_sizes_that_are_alike_share_a_verdict(card: Card) -> None:
    """Times of the one are not compared with times of the other."""
    similar = torch.zeros(2, 4, 8, 12)
    card.ours_ms, contest = 9.9, card.contest()
    assert card.pictures(contest, 1) == [True] and card.pictures(contest, 1, similar) == [True]
    assert card.pictures(contest, 4) == [True, False] * PAIRS
    assert card.pictures(contest, 1, similar) == [False] and len(card.told) == 1


def test_sizes_in_turns_leave_the_host_alone_at_last(card: Card) -> None:
    similar, contest, made = torch.zeros(2, 4, 8, 12), card.contest(), []
    for _ in range(8):
        for x in (X, similar):
            for _ in range(3):  # the host's is cut short
                card.picture(contest, x, steps=STEPS if card.ours else SETTLING[False] + 1)
                made.append(card.seen[-1][-1])
    assert 0 < made.count(False) <= 2 * faster.DISTURBED and all(made[-6:])


@pytest.mark.parametrize("first", [X, LARGE])
def test_a_step_of_two_kinds_is_not_made_by_both(card: Card, first: torch.Tensor) -> None:
    """As of prompts of other sizes: the one that comes first decides for all of the picture."""
    card.ours_ms = 9.9
    contest = card.contest()
    card.pictures(contest, 5)
    card.ours_ms = 1.0
    card.pictures(contest, 3, LARGE)
    second = LARGE if first is X else X
    assert card.pictures(contest, 3, first, second) == [first is LARGE] * 3


def test_a_changed_model_is_measured_anew(card: Card) -> None:
    card.ours_ms = 9.9
    contest = card.contest()
    card.pictures(contest, 5)
    card.model.add_module("more", nn.LayerNorm(2))
    card.ours_ms = 1.0
    assert card.pictures(contest, 3) == [True, False, True]
    card.model.forward = lambda x: x  # as offloading, or another extension
    assert card.pictures(contest, 3) == [True, False, True]
    card.model.to("meta")  # as weights that are brought when they are needed
    assert card.pictures(contest, 3) == [True, False, True]


def test_another_level_is_measured_anew(card: Card) -> None:
    card.ours_ms = 9.9
    contest = card.contest()
    assert not card.pictures(contest, 5)[-1]
    card.setting, card.ours_ms = "Performance", 1.0
    assert card.pictures(contest, 3) == [True, False, True]
    card.setting = "Auto"
    assert card.pictures(contest, 1) == [False]


def test_graphs_switched_on_are_measured_anew(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    card.ours_ms = 9.9
    contest = card.contest()
    assert not card.pictures(contest, 5)[-1]
    monkeypatch.setattr(faster, "obstacle", lambda device: "")
    assert card.pictures(contest, 1) == [True]


def test_a_picture_that_is_not_compared_is_ours(card: Card) -> None:
    """Also amid the host's turn, as a ControlNet's."""
    contest = card.contest()
    assert card.pictures(contest, 1) == [True]
    card.setting = None
    assert card.pictures(contest, 2) == [True, True]
    card.setting = "Auto"
    assert card.pictures(contest, 1) == [False]
    card.setting = None
    assert card.pictures(contest, 1) == [True]


def test_what_is_not_for_a_contest_switches_nothing(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    contest = card.contest()
    assert card.pictures(contest, 2) == [True, False]
    with torch.no_grad(), faster.ours_whatever():
        contest.before(object(), (X,), {})(True)
    contest.before(object(), (), {"x": X})(True)
    assert contest.why_theirs == "torch's attention is being timed, once"
    contest.before(object(), (X,), {})(True)  # with gradients
    assert contest.holds
    card.picture(contest)
    monkeypatch.setattr(faster, "is_compared_on", lambda device: False)
    assert card.pictures(contest, 2) == [True, True] and len(faster._kinds) == 1


def test_without_a_sign_of_a_picture_ours_stays(card: Card) -> None:
    contest = card.contest()
    card.seen.append([])
    for _ in range(40):
        card.call(contest, None)
    assert all(card.seen[-1]) and not card.timed


@pytest.mark.parametrize("why", ["search", "benchmark", "device"])
def test_hosts_that_would_search_are_not_timed(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MIOpen, by a torch that cannot keep it from that, or where the host asks for it."""
    info = SimpleNamespace(arch="a row", reasons=("no",) if why == "device" else ())
    monkeypatch.setattr(faster, "identify", lambda device: info)
    monkeypatch.setattr(faster, "searches", lambda: why == "search")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", why == "benchmark")
    assert not faster.is_compared_on(X.device)
    info.reasons = ()
    monkeypatch.setattr(faster, "searches", lambda: False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    assert faster.is_compared_on(X.device)


def test_no_switch_after_the_end(card: Card) -> None:
    contest = card.contest()
    card.picture(contest)
    contest.end()
    assert all(card.pictures(contest, 3))


def test_a_call_that_fails_is_not_timed(card: Card) -> None:
    contest, picture = card.contest(), object()
    card.picture(contest, steps=SETTLING[True])
    with torch.no_grad():
        contest.before(picture, (), {"sample": X})(False)
    assert len(card.timed) == 1
    card.picture(contest, steps=TIMED - 1)
    card.picture(contest, steps=1)
    assert card.seen[-1] == [True]


def test_a_thread_amid_a_call_is_not_switched_by_another(card: Card) -> None:
    contest = card.contest()
    card.picture(contest)
    kwargs = {"sample": X}

    def other() -> None:
        with torch.no_grad():
            after = contest.before(object(), (), kwargs)
        assert card.ours
        after(True)

    with torch.no_grad():
        after = contest.before(object(), (), {"sample": LARGE})
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    after(True)
    timed = len(card.timed)
    assert card.pictures(contest, 1) == [False] and len(card.timed) == timed + TIMED


def test_a_thread_that_rests_switches_no_others(card: Card) -> None:
    contest = card.contest()
    card.pictures(contest, 2)
    whys = []

    def other() -> None:
        with faster.ours_whatever(), torch.no_grad():
            contest.before(object(), (), {"sample": X})(True)
            whys.append(contest.why_theirs)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert whys == [""] and not card.ours and contest.why_theirs


@pytest.mark.parametrize(
    ("ours", "theirs", "is_ours"),
    [
        ([5.0] * 5, [4.0] * 5, False),
        ([4.1] * 5, [4.0] * 5, True),
        ([1, 5, 5, 5, 9], [4.0] * 5, False),
        ([20, 20, 20, 30, 30], [10, 10, 10, 21, 21], False),  # not ours for the noise
        ([5, 5, 9, 9, 9], [5, 5, 5, 9, 9], True),  # nor theirs
    ],
)
def test_the_verdict(ours: list[float], theirs: list[float], is_ours: bool) -> None:
    verdict = Verdict.of(ours, theirs)
    assert verdict.ours is is_ours and verdict.sure is (max(theirs) == min(theirs))


def test_it_is_wanted_unless_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(faster.VARIABLE, raising=False)
    assert faster.is_wanted()
    monkeypatch.setenv(faster.VARIABLE, "0")
    assert not faster.is_wanted()
