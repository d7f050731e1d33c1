"""How rows are divided between cards, by what was measured."""

from __future__ import annotations

import pytest

from lib_rocm_sd.cards.shares import MEASURED, WARM, Shares, Way, divide

WHOLE, ONCE = WARM + 1, WARM + MEASURED
"""Calls of one card, and of several, before they are compared."""


@pytest.mark.parametrize(
    ("rows", "speeds", "way"),
    [
        (2, (1.0, 1.0), (1, 1)),
        (2, (0.0, 0.0), (1, 1)),
        (2, (0.0, 5.0), (1, 1)),
        (2, (9.0, 1.0), (2, 0)),
        (2, (1.0, 9.0), (1, 1)),  # one row stays here
        (8, (3.0, 1.0), (6, 2)),
        (7, (1.0, 1.0), (4, 3)),
        (8, (2.0, 1.0, 1.0), (4, 2, 2)),
        (2, (1.0, 1.0, 1.0), (1, 1, 0)),
        (1, (1.0, 1.0), (1, 0)),
    ],
)
def test_divide(rows: int, speeds: tuple[float, ...], way: Way) -> None:
    assert divide(rows, speeds, [1, *[0] * (len(speeds) - 1)]) == way


def played(shares: Shares, rows: int, ms: dict[int, float], calls: int) -> list[Way]:
    """`ms`: what a row takes on each card."""
    found = []
    for _ in range(calls):
        way = shares.way("kind", rows, [True] * len(ms))
        each = [count * ms[card] for card, count in enumerate(way)]
        shares.took("kind", way, max(each), [0.0 if way[0] == rows else own for own in each])
        found.append(way)
    return found


def test_whole_then_divided_then_the_faster() -> None:
    found = played(Shares(), 2, {0: 10.0, 1: 11.0}, 3 * ONCE)
    assert found[:WHOLE] == [(2, 0)] * WHOLE and set(found[WHOLE:]) == {(1, 1)}


def test_a_slow_card_is_not_used() -> None:
    shares = Shares()
    found = played(shares, 2, {0: 10.0, 1: 50.0}, 4 * ONCE)
    assert set(found[WHOLE + ONCE :]) == {(2, 0)}
    assert shares.alone("kind", 2) == "one card takes 20.0 ms, and several take 50.0"


def test_a_call_that_records_or_is_held_up_decides_nothing() -> None:
    """The shortest of those measured first counts, and later ones up to twice as long."""
    shares = Shares()
    played(shares, 2, {0: 30.0, 1: 30.0}, WHOLE)
    for ms in (*[1000.0] * WARM, *[200.0] * (MEASURED - 1), 40.0):
        assert shares.way("kind", 2, [True, True]) == (1, 1)
        shares.took("kind", (1, 1), ms)
    assert shares.way("kind", 2, [True, True]) == (1, 1)
    shares.took("kind", (1, 1), 1000.0)
    assert shares.way("kind", 2, [True, True]) == (1, 1)
    for _ in range(3):
        shares.took("kind", (1, 1), 100.0)
    assert shares.way("kind", 2, [True, True]) == (2, 0)


def test_unlike_cards_get_their_shares() -> None:
    found = played(Shares(), 8, {0: 10.0, 1: 30.0}, 4 * ONCE)
    assert found[WHOLE] == (4, 4) and found[-1] == (6, 2)


def test_a_card_that_is_not_usable() -> None:
    shares = Shares()
    played(shares, 8, {0: 10.0, 1: 10.0, 2: 10.0}, 4 * ONCE)
    assert shares.way("kind", 8, [True, True, True]) == (3, 3, 2)
    assert shares.way("kind", 8, [True, False, True]) == (4, 0, 4)
    assert shares.way("kind", 8, [True, False, False]) == (8, 0, 0)


def test_all_is_measured_again() -> None:
    shares = Shares()
    played(shares, 2, {0: 10.0, 1: 50.0}, 4 * ONCE)
    shares.again()
    found = played(shares, 2, {0: 10.0, 1: 5.0}, 20)
    assert (1, 1) in found and found[-1] == (1, 1)


def test_a_way_that_was_begun_is_measured() -> None:
    """Though the first of its calls says that one card takes all: it may have been held up."""
    shares = Shares()
    played(shares, 2, {0: 10.0, 1: 50.0}, WHOLE + WARM + 1)
    assert shares.divided("kind", 2, [True, True]) == (2, 0)
    assert shares.way("kind", 2, [True, True]) == (1, 1)
    assert shares.way("kind", 2, [True, True], new=False) == (2, 0)


def test_noise_is_no_reason_for_another_way() -> None:
    """Each new way plans and records on all cards; a card that has become slower is one."""
    shares = Shares()
    played(shares, 8, {0: 10.0, 1: 10.0}, WHOLE + ONCE)
    found = played(shares, 8, {0: 8.5, 1: 11.5}, 20)
    assert set(found) == {(4, 4)} and shares.divided("kind", 8, [True, True]) == (5, 3)
    found = played(shares, 8, {0: 10.0, 1: 30.0}, 20)
    assert found[-1] == (6, 2)


def test_a_stretch_that_was_held_up_ends_no_way() -> None:
    shares = Shares()
    played(shares, 8, {0: 10.0, 1: 10.0}, WHOLE + ONCE + 8)
    assert set(played(shares, 8, {0: 40.0, 1: 40.0}, 5)) == {(4, 4)}
    assert set(played(shares, 8, {0: 10.0, 1: 10.0}, 9)) == {(4, 4)}
    assert played(shares, 8, {0: 40.0, 1: 40.0}, 9)[-1] == (8, 0)


def test_a_way_that_was_timed_beside_a_busy_card_is_timed_again() -> None:
    shares = Shares()
    played(shares, 4, {0: 10.0, 1: 11.0}, 2 * ONCE)
    busy = played(shares, 4, {0: 10.0, 1: 26.0}, 4 * ONCE)
    assert (2, 2) in busy and busy[-1] == (3, 1)
    free = played(shares, 4, {0: 10.0, 1: 11.0}, 4 * ONCE)
    assert free[-1] == (2, 2)
    assert free.index((2, 2)) < 8  # of the last calls, most were quick
