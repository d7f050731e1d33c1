"""LDS: its contents, who touched which half word since the last barrier, and bank conflicts."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from tests.poison import POISON
from tests.verify.amdgpu.errors import HazardError, OutOfBoundsError, RaceError, UnsupportedError
from tests.verify.amdgpu.state import LDS, Waves

Array = np.ndarray[Any, Any]
_MANY = 63
"""Stands for "several waves" among those that have read."""
_BANKS = 32


class LdsMemory:
    """The LDS of `groups` work-groups, `size` bytes each, poisoned with NaN.

    Who wrote or read a half word last, and after how many barriers, is one number:
    64 * barriers + wave; several readers are wave 63.
    """

    def __init__(self, groups: int, size: int) -> None:
        self.size = size
        self.stride = -(-size // 16) * 16
        self.words = np.full(groups * self.stride // 4, POISON, np.uint32)
        self.halves = self.words.view(np.uint16)
        self.bytes = self.words.view(np.uint8)
        self.written = np.full(len(self.halves), -1, np.int32)
        self.read = np.full(len(self.halves), -1, np.int32)

    def places(self, b: Waves, addresses: Array, size: int, unit: int) -> Array:
        """Where active lanes access: (n,) byte offsets in all of LDS, from (waves, lanes) addresses
        in the group's own. Raises where it is outside, or not aligned to `unit` bytes.
        """
        flat = addresses[b.exec]
        if len(flat) and (int(flat.max()) + size > self.size or int(flat.min()) < 0):
            worst = int(flat.max())
            raise OutOfBoundsError(
                f"LDS access of {size} bytes at {worst:#x}, the work-group has {self.size:#x}"
            )
        if len(flat) and (flat & (unit - 1)).any():
            raise UnsupportedError(f"LDS access that is not aligned to {unit} bytes")
        return (addresses + b.lds_base[:, None])[b.exec]

    def touch(self, b: Waves, places: Array, size: int, writes: bool) -> None:
        """Note an access of active lanes and raise RaceError where it races with another wave's."""
        if b.signalled.any():
            raise HazardError("LDS is touched between signalling a barrier and waiting for it")
        mine = (64 * b.epoch + b.wave).astype(np.int32)
        mine = np.repeat(mine, np.count_nonzero(b.exec, axis=1))[:, None]
        count = max(1, size // 2)
        at: Array
        written: Array
        read: Array
        if (places & size - 1).any() or size == 12:
            at, written, read = (places >> 1)[:, None] + np.arange(count), self.written, self.read
        else:  # whole rows of so many half words
            at = places // (2 * count)
            written, read = self.written.reshape(-1, count), self.read.reshape(-1, count)
        self._check(written[at], mine, places)
        readers = read[at]
        if writes:
            self._check(readers, mine, places)
            written[at] = mine
            # Two waves in one instruction: the later one's mark hides the earlier one's.
            self._check(written[at], mine, places)
            return
        same = _another_waves(readers, mine)
        read[at] = np.where(same, mine | _MANY, mine) if same.any() else mine
        hidden = read[at]
        lost = hidden != mine
        if lost.any():
            lost &= hidden & _MANY != _MANY
            halves = (places >> 1)[:, None] + np.arange(count)
            self.read[halves[lost]] = np.broadcast_to(mine, halves.shape)[lost] | _MANY

    def _check(self, last: Array, mine: Array, places: Array) -> None:
        racing = _another_waves(last, mine)
        if racing.any():
            lane, half = np.argwhere(racing)[0]
            at = int(places[lane]) // 2 * 2 + 2 * int(half)
            other, own = int(last[lane, half]) & 63, int(mine[lane, 0]) & 63
            who = "several waves" if other == _MANY else f"wave {other}"
            raise RaceError(
                f"wave {own} and {who} touch LDS {at % self.stride:#x} with "
                "no barrier between, and one of them writes"
            )

    def conflicts(self, b: Waves, addresses: Array, size: int) -> int:
        """Clocks beyond the first that bank conflicts cost all of these waves.

        A pass serves as many lanes as 128 bytes hold; lanes that want different words of the same
        bank wait for each other.
        """
        total = 0
        lanes = np.where(b.exec, addresses, -1).astype(np.int32)
        for row in lanes:
            total += _conflicts(row.tobytes(), size)
        return total


def _another_waves(marks: Array, mine: Array) -> Array:
    """Where they are of the same time between two barriers, and of another wave."""
    differ = (marks ^ mine).view(np.uint32)  # from 1 to 63, then
    differ -= np.uint32(1)
    return differ < np.uint32(_MANY)


@lru_cache(maxsize=1 << 16)
def _conflicts(addresses: bytes, size: int) -> int:
    row = np.frombuffer(addresses, np.int32)
    words = max(1, size // 4)
    at_once = max(1, _BANKS // words)
    extra = 0
    for first in range(0, len(row), at_once):
        lanes = row[first : first + at_once]
        lanes = lanes[lanes >= 0]
        if not len(lanes):
            continue
        wanted = np.unique((lanes[:, None] >> 2) + np.arange(words))
        extra += int(np.bincount(wanted % _BANKS).max()) - 1
    return extra


def barrier_is_safe(b: Waves) -> None:
    """Raises HazardError where a wave reaches a barrier with LDS accesses on their way."""
    if (b.issued[LDS] > b.done[LDS]).any():
        raise HazardError("a barrier is reached while LDS accesses have not been waited for")
