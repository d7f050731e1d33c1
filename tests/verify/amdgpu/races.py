"""Global memory: who touched which half word, and whether barriers and waits order it.

What orders two accesses (LLVM, "User Guide for AMDGPU Backend", memory models of GFX90A to GFX12):
those of a wave are in order. Those of a work-group's waves are ordered by a barrier between them.
Where its waves may run on two CUs (WGP mode of RDNA), each with a cache of its own, the first must
also have been waited for before the barrier, and a reader must have its cache emptied after it.
Those of two work-groups are never ordered, unless both are atomics. Scalar loads have a cache of
their own: they find nothing that this launch has stored.

Two stores of the same value are in order however they come. That a wave waits for what another's
atomic leaves in memory orders nothing here: no kernel does it.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.verify.amdgpu.decode import Instruction
from tests.verify.amdgpu.errors import RaceError
from tests.verify.amdgpu.memory import Buffer, Memory
from tests.verify.amdgpu.state import SMEM, Waves

Array = np.ndarray[Any, Any]
MOST_BYTES = 1 << 27
"""Of addresses that are kept, to name lanes and for buffers that nobody has written so far."""
_WAVES = 64
"""More than a work-group has: a wave's key is 64 * group + wave."""
MOST_REGIONS = 16
_NEAR = 1 << 36
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


@dataclass(slots=True)
class Access:
    """One instruction of some waves. `first`: the number of its first wave's part; `at`: the
    addresses of active lanes, None once they are forgotten.
    """

    first: int
    ins: Instruction
    counter: int
    writes: bool
    atomic: bool
    size: int
    group: Array
    wave: Array
    epoch: Array
    seq: Array
    active: Array | None
    at: Array | None

    def rows(self) -> Array:
        """(n,) which of the waves each of `at` belongs to."""
        if self.active is None:
            return np.arange(len(self.group))
        return np.nonzero(self.active)[0]

    def columns(self) -> Array:
        """(n,) the lane of each of `at`."""
        return self.rows() * 0 if self.active is None else np.nonzero(self.active)[1]


class _Shadow:
    """Of each half word of a region, the numbers of who wrote last and of two who read it, of
    different waves and, where there are, of different groups; 0 is nobody.
    """

    def __init__(self, first: int, end: int) -> None:
        self.first, self.end = first, end
        count = -(-(end - first) // 2)
        self.written, self.read, self.read_too = (_sparse_zeros(count) for _ in range(3))

    def places(self, at: Array, size: int) -> tuple[Any, Array] | None:
        """Which addresses lie here, and their half words, (n, halves)."""
        first, end = np.uint64(self.first), np.uint64(self.end)
        lowest, highest = (at.min(), at.max() + np.uint64(size)) if len(at) else (end, end)
        if lowest >= end or highest <= first:
            return None
        which: Any = slice(None)
        if lowest < first or highest > end:
            which = (at >= first) & (at + np.uint64(size) <= end)
        halves = ((at[which] - first) >> np.uint64(1)).astype(np.int64)
        return which, halves[:, None] + np.arange(max(1, size // 2))


def _sparse_zeros(count: int) -> Array:
    """int32, of which only what is touched takes memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return np.frombuffer(mmap.mmap(-1, max(4, 4 * count), flags=flags), np.int32)


def _regions(buffers: list[Buffer]) -> list[tuple[int, int]]:
    """Where each begins and ends. Many, the rows of a tensor that is larger than all memory, are
    taken together, as far as they are near.
    """
    found: list[tuple[int, int]] = []
    for buffer in sorted(buffers, key=lambda each: each.address):
        if len(buffers) > MOST_REGIONS and found and buffer.address - found[-1][1] < _NEAR:
            found[-1] = (found[-1][0], buffer.end)
        else:
            found.append((buffer.address, buffer.end))
    return found


class _Table:
    """By the number of a wave's access: key, epoch, place in its counter, counter, atomic; and the
    keys once more, in a row.
    """

    def __init__(self) -> None:
        self.rows = np.zeros((1 << 10, 5), np.int64)
        self.keys = np.zeros(1 << 10, np.int64)
        self.rows[0, 0] = self.keys[0] = -1
        self.filled = 0

    def fill(self, accesses: list[Access]) -> None:
        """Put down those that are not there."""
        for access in accesses[self.filled :]:
            end = access.first + len(access.group)
            while end > len(self.rows):
                self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
                self.keys = np.concatenate([self.keys, np.zeros_like(self.keys)])
            rows = self.rows[access.first : end]
            rows[:, 0] = self.keys[access.first : end] = _WAVES * access.group + access.wave
            rows[:, 1], rows[:, 2] = access.epoch, access.seq
            rows[:, 3], rows[:, 4] = access.counter, access.atomic
        self.filled = len(accesses)


class Races:
    """Of one launch. `two_caches`: a work-group's waves may run on two CUs."""

    def __init__(self, memory: Memory | None = None, two_caches: bool = True) -> None:
        self.memory, self.two_caches = memory or Memory(), two_caches
        self.accesses: list[Access] = []
        self.table = _Table()
        self.shadows: dict[tuple[int, int], _Shadow] = {}
        self._found: list[tuple[int, int]] | None = None
        self.kept_bytes, self.next = 0, 1
        self.begin(1)

    def begin(self, groups: int) -> None:
        """Other work-groups, so many, are executed from now on."""
        self.settled = np.zeros((groups, _WAVES, 4), np.int32)

    def passed(self, b: Waves) -> None:
        """These waves have passed a barrier."""
        self.settled[b.slot, b.wave] = b.settled.T

    def load(
        self, b: Waves, ins: Instruction, at: Array, size: int, counter: int, active: Array | None
    ) -> None:
        """`at`: (n,) uint64, of active lanes, or of all waves (`active` is None). RaceError."""
        access = self._noted(b, ins, at, size, counter, active)
        for shadow in self.shadows.values():
            self._read(shadow, access, b)

    def store(
        self, b: Waves, ins: Instruction, at: Array, data: Array, counter: int, atomic: bool = False
    ) -> None:
        """Before `data`, (n, bytes) uint8, is stored. Raises RaceError."""
        access = self._noted(b, ins, at, data.shape[1], counter, b.exec)
        access.writes, access.atomic = True, atomic
        first, last = int(at.min()), int(at.max())
        for region in self.regions():
            if first < region[1] and last >= region[0]:
                self._write(self._shadow(region), access, b, data)

    def atomic(self, b: Waves, ins: Instruction, at: Array, size: int, counter: int) -> None:
        """Likewise, before places are changed that other atomics may change at the same time."""
        self.store(b, ins, at, np.zeros((len(at), size), np.uint8), counter, atomic=True)

    def stored(self, b: Waves, at: Array, data: Array) -> None:
        """After it was: raises RaceError where lanes of one instruction stored different values in
        one place.
        """
        lost = (_bytes(self.memory, at, data.shape[1]) != data).any(axis=1)
        if lost.any():
            row, lane = np.argwhere(b.exec)[int(np.argmax(lost))]
            raise RaceError(
                f"{_who(b.group[row], b.wave[row], lane)} and another lane store "
                f"different values at {int(at[np.argmax(lost)]):#x} at once"
            )

    # -- what happened

    def _noted(
        self, b: Waves, ins: Instruction, at: Array, size: int, counter: int, active: Array | None
    ) -> Access:
        epoch = b.epoch + b.signalled  # what comes after the signal is not ordered by the barrier
        made = Access(
            *(self.next, ins, counter, False, False, size, b.group, b.wave, epoch),
            *(b.issued[counter].copy(), active, at),
        )
        self.accesses.append(made)
        self.next += b.count
        self.kept_bytes += 8 * len(at)
        if self.kept_bytes > MOST_BYTES:
            self._forget(made)
        return made

    def _forget(self, but: Access) -> None:
        for region in self.regions():
            self._shadow(region, but)
        for access in self.accesses[:-1]:
            access.at = access.active = None
        self.kept_bytes = 0

    def regions(self) -> list[tuple[int, int]]:
        """Of memory that can be written."""
        if self._found is None:
            self._found = _regions([each for each in self.memory.buffers if each.writable])
        return self._found

    def _shadow(self, region: tuple[int, int], but: Access | None = None) -> _Shadow:
        """With all reads so far, which nobody had a reason to put down; those of `but` come."""
        if region not in self.shadows:
            made = self.shadows[region] = _Shadow(*region)
            for access in self.accesses:
                if not access.writes and access is not but:
                    self._put_down(made, access)
        return self.shadows[region]

    def _put_down(self, shadow: _Shadow, access: Access) -> None:
        found = None if access.at is None else shadow.places(access.at, access.size)
        if found is not None:
            which, places = found
            mine = np.broadcast_to((access.first + access.rows())[which][:, None], places.shape)
            self._add_readers(shadow, places, mine)

    def _add_readers(self, shadow: _Shadow, places: Array, mine: Array) -> None:
        self.table.fill(self.accesses)
        before, too = shadow.read[places], shadow.read_too[places]
        shadow.read[places] = mine
        if before.any() or too.any():
            second = np.where(self._apart(before, mine) >= self._apart(too, mine), before, too)
            shadow.read_too[places] = second
        top = shadow.read[places]
        if np.array_equal(top, mine):
            return
        apart = self._apart(mine, top) * (mine != top)  # several waves in one instruction
        for distance in (1, 2):
            more = (apart == distance) & (self._apart(shadow.read_too[places], top) < distance)
            shadow.read_too[places[more]] = mine[more]

    def _apart(self, one: Array, other: Array) -> Array:
        """0 the same wave or nobody, 1 the same group, 2 other groups."""
        a, b = self.table.keys[one], self.table.keys[other]
        differ = (a ^ b).view(np.uint64)
        apart = (differ != 0).view(np.int8) + (differ >= np.uint64(_WAVES)).view(np.int8)
        apart[one == 0] = 0
        return apart

    # -- what may not

    def _read(self, shadow: _Shadow, access: Access, b: Waves) -> None:
        assert access.at is not None
        found = shadow.places(access.at, access.size)
        if found is None:
            return
        which, places = found
        rows = access.rows()[which]
        last = shadow.written[places]
        if last.any():
            self.table.fill(self.accesses)
            self._check(shadow, access, b, rows, places, last)
        self._put_down(shadow, access)

    def _write(self, shadow: _Shadow, access: Access, b: Waves, data: Array) -> None:
        assert access.at is not None
        found = shadow.places(access.at, access.size)
        if found is None:
            return
        which, places = found
        rows = access.rows()[which]
        self.table.fill(self.accesses)
        for last in (shadow.read[places], shadow.read_too[places]):
            if last.any():
                self._check(shadow, access, b, rows, places, last)
        last = shadow.written[places]
        if last.any():
            there = _bytes(self.memory, access.at[which], access.size)
            other = (there != data[which]).reshape(*places.shape, -1).any(axis=2) | access.atomic
            self._check(shadow, access, b, rows, places, last * other)
        shadow.written[places] = (access.first + rows)[:, None]

    def _check(
        self, shadow: _Shadow, access: Access, b: Waves, rows: Array, places: Array, last: Array
    ) -> None:
        """`last`: (n, halves), who touched each place before."""
        wrong = self._unordered(access, b, rows[:, None], last)
        if wrong.any():
            lane, half = np.argwhere(wrong)[0]
            raise self._race(shadow, access, b, int(lane), places[lane, half], last[lane, half])

    def _unordered(self, access: Access, b: Waves, rows: Array, last: Array) -> Array:
        key, epoch, seq, counter, atomic = np.moveaxis(self.table.rows[last], -1, 0)
        group, wave = key // _WAVES, key % _WAVES
        if access.counter == SMEM:
            return last != 0
        ordered = (group == b.group[rows]) & (epoch < b.epoch[rows])
        if self.two_caches:
            slot = np.where(ordered, b.slot[rows], 0)
            ordered &= seq <= self.settled[slot, wave, counter]
            if not access.writes:
                ordered &= epoch < b.fresh[rows]
        ordered |= key == _WAVES * b.group[rows] + b.wave[rows]
        if access.atomic:
            ordered |= atomic != 0
        return (last != 0) & ~ordered

    # -- words

    def _race(
        self, shadow: _Shadow, access: Access, b: Waves, lane: int, place: int, number: int
    ) -> RaceError:
        starts = [each.first for each in self.accesses]
        other = self.accesses[bisect_right(starts, int(number)) - 1]
        address = shadow.first + 2 * int(place)
        buffer = next(each for each in self.memory.buffers if each.address <= address < each.end)
        assert access.at is not None
        found = shadow.places(access.at, access.size)
        assert found is not None
        row, column = (int(part[found[0]][lane]) for part in (access.rows(), access.columns()))
        own = _who(b.group[row], b.wave[row], None if access.active is None else column)
        before = int(number) - other.first
        them = _who(other.group[before], other.wave[before], _lane_at(other, before, address))
        why = self._why(access, other, b, row, before)
        here = f"{buffer.name} + {address - buffer.address:#x}"
        does, did = "stores" if access.writes else "loads", "stored" if other.writes else "loaded"
        said = f"{own} {does} at {here} what {them} {did} by {other.ins}: {why}"
        return RaceError(said, (other.ins.address,))

    def _why(self, access: Access, other: Access, b: Waves, row: int, before: int) -> str:
        if access.counter == SMEM:
            return "a scalar load may find in its cache what was there before"
        if b.group[row] != other.group[before]:
            return "nothing orders work-groups"
        if other.epoch[before] >= b.epoch[row]:
            return "no barrier lies between"
        settled = self.settled[b.slot[row], other.wave[before], other.counter]
        if other.seq[before] > settled:
            return "that was not waited for before the barrier"
        return "the cache was not emptied after the barrier"


def _bytes(memory: Memory, at: Array, size: int) -> Array:
    return np.ascontiguousarray(memory.load(at, size)).view(np.uint8).reshape(len(at), size)


def _lane_at(access: Access, row: int, address: int) -> int | None:
    """The lane of this wave whose access covers the address, as far as it is still known."""
    if access.at is None or access.active is None:
        return None
    at = access.at
    own = (access.rows() == row) & (at <= np.uint64(address + 1))
    own &= at + np.uint64(access.size) > np.uint64(address)
    return int(access.columns()[np.argmax(own)]) if own.any() else None


def _who(group: Any, wave: Any, lane: int | None) -> str:
    return f"{'' if lane is None else f'lane {lane} of '}wave {wave}, group {group},"
