"""Who computes how much of a call: what took least, of what was measured, shared by speed.

A way is a tuple of rows, one's own card first. A kind of call is first computed as a whole, then
divided by the speeds that are known, and once more if these turn out to be others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

Way = tuple[int, ...]
Part = tuple[int, int]
"""The first and the one after the last."""
WARM = 2
"""Calls of a way that are not counted: they compile, choose and record."""
MEASURED = 2
"""Calls of a way that are, before it is compared; one of them where one card computes all."""
MOST_WAYS = 4
RECENT = 8
"""Calls of which the lower quartile counts: a live preview, or another program, holds up some."""
GAIN = 0.9
"""What another way has to take, by the cards' speeds, of the best that was measured: each new one
plans and records on all cards.
"""


@dataclass
class Kind:
    """What is known of one kind of call, times in ms."""

    calls: dict[Way, int] = field(default_factory=dict)
    times: dict[Way, float] = field(default_factory=dict)
    speeds: dict[int, float] = field(default_factory=dict)
    """Rows per ms of each card, by its place in a way."""
    expected: dict[Way, float] = field(default_factory=dict)
    """What a way takes by the cards' speeds when it was last timed."""
    recent: dict[Hashable, deque[float]] = field(default_factory=dict)
    """What the last calls of a way took, and the last rows of a card."""

    def typical(self, of: Hashable, ms: float) -> float:
        """The lower quartile of the last ones, with this one."""
        last = self.recent.setdefault(of, deque(maxlen=RECENT))
        last.append(ms)
        return sorted(last)[len(last) // 4]


class Shares:
    """Decides how many rows each card computes, for all kinds of calls."""

    def __init__(self, warm: int | None = None) -> None:
        """`warm`: calls of a way that are not counted, as WARM."""
        self.warm = WARM if warm is None else warm
        self.measured = MEASURED
        self._kinds: dict[Hashable, Kind] = {}

    def of(self, kind: Hashable) -> Kind:
        """What is known of it."""
        return self._kinds.setdefault(kind, Kind())

    def forget(self) -> None:
        self._kinds.clear()

    def way(self, kind: Hashable, rows: int, usable: Sequence[bool], new: bool = True) -> Way:
        """For the next call, of `rows` rows, on the cards that are `usable`, as one's own is.
        `new`: it may be one that was not measured yet.
        """
        record = self.of(kind)
        whole = (rows, *[0] * (len(usable) - 1))
        if not self._is_measured(record, whole) or rows < 2 or not any(usable[1:]):
            return whole
        divided = self.divided(kind, rows, usable)
        slower = record.expected.get(divided, 0.0) if any(divided[1:]) else 0.0
        if new and _expected(record, divided) < GAIN * slower:  # timed while a card was held up
            record.calls[divided] = self.warm
            del record.times[divided], record.recent[divided], record.expected[divided]
        fitting = [way for way in record.calls if _fits(way, usable)]
        measured = [way for way in fitting if self._is_measured(record, way)]
        begun = [way for way in fitting if way not in measured]
        if new and begun:
            return begun[0]
        shared = [_expected(record, way) for way in measured if any(way[1:])]
        is_better = not shared or _expected(record, divided) < GAIN * min(shared)
        if new and is_better and divided not in measured and len(measured) < MOST_WAYS:
            return divided
        return min(measured, key=record.times.__getitem__)

    def is_warm(self, kind: Hashable, way: Way) -> bool:
        """Whether nothing has to be compiled, chosen or recorded for calls of this way."""
        return self.of(kind).calls.get(way, 0) >= self.warm

    def divided(self, kind: Hashable, rows: int, usable: Sequence[bool]) -> Way:
        """`rows` over all usable cards, by their speeds as far as they are known."""
        speeds = self.of(kind).speeds
        cards = [card for card, can in enumerate(usable) if can]
        least = [int(card == 0) for card in cards]  # a row stays here
        way = divide(rows, [speeds.get(card, 0.0) for card in cards], least)
        share = dict(zip(cards, way, strict=True))
        return tuple(share.get(card, 0) for card in range(len(usable)))

    def again(self) -> None:
        """Measure all ways again, when they come up: the cards may have become others."""
        for record in self._kinds.values():
            record.calls = dict.fromkeys(record.calls, self.warm)
            for known in (record.times, record.speeds, record.recent, record.expected):
                known.clear()  # type: ignore[attr-defined]

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
        record = self.of(kind)
        record.calls[way] = record.calls.get(way, 0) + 1
        if record.calls[way] <= self.warm:
            return
        record.times[way] = record.typical(way, ms)
        for card, (rows, own_ms) in enumerate(zip(way, each, strict=False)):
            if rows and own_ms > 0:
                record.speeds[card] = 1 / record.typical(card, own_ms / rows)
        record.expected[way] = _expected(record, way)

    def _is_measured(self, record: Kind, way: Way) -> bool:
        measured = self.measured if any(way[1:]) else 1
        return record.calls.get(way, 0) >= self.warm + measured


def divide(count: int, speeds: Sequence[float], least: Sequence[int]) -> Way:
    """`count` over cards by their speeds, so that the last to finish does so as soon as can be.

    Each has its `least` or more. Speeds that are not known (0) are taken to be the mean of the
    others.
    """
    positive = [speed for speed in speeds if speed > 0]
    mean = sum(positive) / len(positive) if positive else 1.0
    speeds = [speed if speed > 0 else mean for speed in speeds]
    way = list(least)
    for _ in range(count - sum(way)):
        card = min(range(len(way)), key=lambda c: ((way[c] + 1) / speeds[c], c))
        way[card] += 1
    return tuple(way)


def split(count: int, weights: Sequence[float], least: int = 0) -> list[Part]:
    """0 to `count` in one part for each weight, in order, each of `least` or more.

    Raises ValueError where that is not possible.
    """
    if not weights or min(weights) <= 0:
        raise ValueError(f"weights have to be above 0, one for each rank: {list(weights)}")
    if count < least * len(weights):
        raise ValueError(f"{count} cannot be split into {len(weights)} parts of {least} or more")
    return parts(divide(count, weights, [least] * len(weights)))


def parts(way: Way) -> list[Part]:
    """What each card has of the rows, in order."""
    ends = list(accumulate(way))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _fits(way: Way, usable: Sequence[bool]) -> bool:
    return len(way) == len(usable) and all(
        can or not rows for can, rows in zip(usable, way, strict=True)
    )


def _expected(record: Kind, way: Way) -> float:
    """What a way takes, in ms, by the cards' speeds; a card whose speed is not known takes none."""
    return max(rows / record.speeds.get(card, float("inf")) for card, rows in enumerate(way))


class Clock:
    """Times calls on `home`: what a device takes is known when the next call asks."""

    def __init__(self, home: torch.device, shares: Shares) -> None:
        self._on_device, self._shares = home.type == "cuda", shares
        self._home = home
        self._pending: list[tuple[Hashable, Way, list[Any], dict[int, float]]] = []
        self._each: dict[int, float] = {}
        self._kind: Hashable = ()
        self.way: Way = ()
        """The way of the call that is timed; another where it turned out so."""
        self.counts = True
        """Whether it is one by which to judge."""
        self._marks: list[Any] = []

    def of(self, kind: Hashable, way: Way) -> Clock:
        """To be entered around a call. One that raises is not counted."""
        self._kind, self.way, self._each, self._marks = kind, way, {}, []
        self.counts = True
        return self

    def took(self, card: int, ms: float) -> None:
        """What a card took for its part."""
        self._each[card] = ms

    def __enter__(self) -> Clock:
        self._settle()
        self.mark()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.mark()
        if kind is None and self.counts:
            self._pending.append((self._kind, self.way, self._marks, self._each))
            self._settle()

    def mark(self) -> None:
        """One's own part begins, or ends when the device comes so far: not told where `took` says
        what one's own card took.
        """
        if not self._on_device:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._home))
        self._marks.append(event)

    def _settle(self) -> None:
        while self._pending:
            kind, way, marks, each = self._pending[0]
            if self._on_device and not marks[-1].query():
                return
            self._pending.pop(0)
            own = {0: self._between(marks[1], marks[2])} if len(marks) > 3 else {}
            times = {**own, **each}
            row = [times.get(card, 0.0) for card in range(len(way))]
            self._shares.took(kind, way, self._between(marks[0], marks[-1]), row)

    def _between(self, first: Any, last: Any) -> float:
        """In ms."""
        if self._on_device:
            return float(first.elapsed_time(last))
        return 1000 * float(last - first)
