"""How many rows of a call each card computes: what took least, of what was measured.

A way is a tuple of rows, one's own card first. A kind of call is first computed as a whole, then
divided by the speeds that are known, and once more if these turn out to be others.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

Way = tuple[int, ...]
WARM = 2
"""Calls of a way that are not counted: they compile, choose and record."""
MEASURED = 2
MOST_WAYS = 4
_SMOOTH = 0.3


@dataclass
class Kind:
    """What is known of one kind of call, times in ms."""

    calls: dict[Way, int] = field(default_factory=dict)
    times: dict[Way, float] = field(default_factory=dict)
    speeds: dict[int, float] = field(default_factory=dict)
    """Rows per ms of each card, by its place in a way."""


class Shares:
    """Decides how many rows each card computes, for all kinds of calls."""

    def __init__(self, warm: int | None = None, measured: int | None = None) -> None:
        """`warm`, `measured`: calls of a way, as WARM and MEASURED."""
        self.warm = WARM if warm is None else warm
        self.measured = MEASURED if measured is None else measured
        self._kinds: dict[Hashable, Kind] = {}

    def of(self, kind: Hashable) -> Kind:
        """What is known of it."""
        return self._kinds.setdefault(kind, Kind())

    def forget(self) -> None:
        self._kinds.clear()

    def way(self, kind: Hashable, rows: int, usable: Sequence[bool]) -> Way:
        """For the next call, of `rows` rows, on the cards that are `usable`, as one's own is."""
        known = self.of(kind)
        whole = (rows, *[0] * (len(usable) - 1))
        if not self._is_measured(known, whole) or rows < 2 or not any(usable[1:]):
            return whole
        divided = self.divided(kind, rows, usable)
        fitting = [
            way for way in known.times if _fits(way, usable) and self._is_measured(known, way)
        ]
        if not self._is_measured(known, divided) and len(fitting) < MOST_WAYS:
            return divided
        return min(fitting, key=known.times.__getitem__)

    def divided(self, kind: Hashable, rows: int, usable: Sequence[bool]) -> Way:
        """`rows` over all usable cards, by their speeds as far as they are known."""
        speeds = self.of(kind).speeds
        cards = [card for card, can in enumerate(usable) if can]
        share = dict(
            zip(cards, divide(rows, [speeds.get(card, 0.0) for card in cards]), strict=True)
        )
        return tuple(share.get(card, 0) for card in range(len(usable)))

    def again(self) -> None:
        """Measure all ways again, when they come up: the cards may have become others."""
        for known in self._kinds.values():
            known.calls = dict.fromkeys(known.calls, self.warm)
            known.times.clear()
            known.speeds.clear()

    def alone(self, kind: Hashable, rows: int) -> str:
        """Why one card computes a call of `rows` rows though others could."""
        times = self.of(kind).times
        divided = {way: ms for way, ms in times.items() if way[0] < rows}
        if not divided:
            return "what one card takes is measured first"
        way = min(divided, key=divided.__getitem__)
        whole = next((ms for of, ms in times.items() if of[0] == rows), 0.0)
        return f"one card takes {whole:.1f} ms, and several take {divided[way]:.1f}"

    def took(self, kind: Hashable, way: Way, ms: float, each: Sequence[float] = ()) -> None:
        """A call took `ms`, and each card `each` of its own (0: not known)."""
        known = self.of(kind)
        known.calls[way] = known.calls.get(way, 0) + 1
        if known.calls[way] <= self.warm:
            return
        known.times[way] = _smooth(known.times.get(way), ms)
        for card, (rows, own_ms) in enumerate(zip(way, each, strict=False)):
            if rows and own_ms > 0:
                known.speeds[card] = _smooth(known.speeds.get(card), rows / own_ms)

    def _is_measured(self, known: Kind, way: Way) -> bool:
        return known.calls.get(way, 0) >= self.warm + self.measured


def divide(rows: int, speeds: Sequence[float]) -> Way:
    """`rows` over cards by their speeds, so that the last to finish does so as soon as can be. The
    first has one at least. Speeds that are not known (0) are taken to be the mean of the others.
    """
    known = [speed for speed in speeds if speed > 0]
    mean = sum(known) / len(known) if known else 1.0
    taken = [speed if speed > 0 else mean for speed in speeds]
    way = [1, *[0] * (len(taken) - 1)]
    for _ in range(rows - 1):
        card = min(range(len(taken)), key=lambda c: ((way[c] + 1) / taken[c], c))
        way[card] += 1
    return tuple(way)


def _fits(way: Way, usable: Sequence[bool]) -> bool:
    return len(way) == len(usable) and all(
        can or not rows for can, rows in zip(usable, way, strict=True)
    )


def _smooth(before: float | None, now: float) -> float:
    return now if before is None else before + _SMOOTH * (now - before)
