"""How waves take turns: in lockstep as far as they can, or at random from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.verify.amdgpu.state import Waves

Array = np.ndarray[Any, Any]
MOST_PARTS = 6
"""With more of them waves first meet again: each part costs as much as all waves together."""
WITHOUT_END = 1 << 62


class Lockstep:
    """All waves at once, now and then some of each group before the others; a barrier is passed
    when no wave can do anything else.
    """

    def __init__(self, seed: Any, waves_per_group: int) -> None:
        self.random = np.random.default_rng(seed)
        self.waves_per_group = waves_per_group

    def sets(self, groups: Sequence[int], at_once: int) -> list[Array]:
        """The work-groups that are executed together, set after set."""
        order = self.random.permutation(groups)
        return [order[first : first + at_once] for first in range(0, len(order), at_once)]

    def begun(self, b: Waves) -> list[Waves]:
        """All waves, or, by chance, some of each group before the others, or each alone first."""
        if self.waves_per_group == 1 or self.random.random() < 0.75:
            b.shift = 0
            return [b]
        first = self.random.permutation(self.waves_per_group)
        first = first[: self.random.integers(1, self.waves_per_group)]
        parts = _parted(b, np.isin(b.wave, first))
        for shift, part in enumerate(parts):
            part.shift = shift
        return parts

    def chosen(self, ready: list[Waves]) -> tuple[Waves, list[Waves], set[int], int]:
        """Who goes on, and who does not; the places where they may meet, and after how many
        instructions they stop at the latest. Those that are behind go first.
        """
        key = min((b.shift, b.pc) for b in ready)
        batch = Waves.join([b for b in ready if (b.shift, b.pc) == key])
        others = [b for b in ready if (b.shift, b.pc) != key]
        return batch, others, {b.pc for b in others if b.shift == key[0]}, WITHOUT_END

    def released(
        self, ready: list[Waves], waiting: list[Waves], live: Array
    ) -> tuple[list[Waves], list[Waves]]:
        """Who passes the barrier now, and who goes on waiting. `live`: waves of each group that
        have not ended.
        """
        if ready or not waiting:
            return [], waiting
        passed = _met(waiting)
        return (self.begun(passed[0]) if len(passed) == 1 else passed), []


class Drawn(Lockstep):
    """Random waves go on for a random number of instructions, each group passes its barriers when
    it likes, and random sets of groups are executed together.
    """

    def sets(self, groups: Sequence[int], at_once: int) -> list[Array]:
        order, found = self.random.permutation(groups), []
        while len(order):
            count = int(self.random.integers(1, at_once + 1))
            found.append(order[:count])
            order = order[count:]
        return found

    def begun(self, b: Waves) -> list[Waves]:
        b.shift = 0
        return [b]

    def chosen(self, ready: list[Waves]) -> tuple[Waves, list[Waves], set[int], int]:
        if len(ready) > MOST_PARTS:
            return super().chosen(ready)
        number = int(self.random.integers(len(ready)))
        others = ready[:number] + ready[number + 1 :]
        parts = [ready[number]]
        if parts[0].count > 1 and self.random.random() < 0.5:
            parts = _parted(parts[0], self.random.random(parts[0].count) < self.random.random())
        most = 1 + int(self.random.exponential(self.random.choice([4, 40, 400])))
        return parts[0], others + parts[1:], set(), most

    def released(
        self, ready: list[Waves], waiting: list[Waves], live: Array
    ) -> tuple[list[Waves], list[Waves]]:
        if not waiting or (ready and self.random.random() < 0.5):
            return [], waiting
        arrived = np.zeros_like(live)
        for b in waiting:
            np.add.at(arrived, b.slot, 1)
        complete = np.flatnonzero((arrived == live) & (live > 0))
        if len(complete) > 1:
            complete = self.random.permutation(complete)
            complete = complete[: self.random.integers(1, len(complete) + 1)]
        passed: list[Waves] = []
        left: list[Waves] = []
        for b in waiting:
            goes = np.isin(b.slot, complete)
            for side, where in ((goes, passed), (~goes, left)):
                if side.any():
                    where.append(b if side.all() else b.part(np.flatnonzero(side)))
        return _met(passed), left


def schedule_of(seed: int, number: int, waves_per_group: int) -> Lockstep:
    """Number 0 is lockstep."""
    return Drawn((seed, number), waves_per_group) if number else Lockstep(seed, waves_per_group)


def _parted(b: Waves, first: Array) -> list[Waves]:
    """One or two, those of `first` before the others."""
    return [b.part(np.flatnonzero(side)) for side in (first, ~first) if side.any()]


def _met(waiting: list[Waves]) -> list[Waves]:
    """Those that are at the same place, together."""
    by_place: dict[int, list[Waves]] = {}
    for b in waiting:
        b.shift = 0
        by_place.setdefault(b.pc, []).append(b)
    return [Waves.join(parts) for parts in by_place.values()]
