"""Global memory as guarded buffers. Addresses are those of the host; an access must lie in one
buffer.
"""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.verify.amdgpu.errors import OutOfBoundsError

Array = np.ndarray[Any, Any]


@dataclass
class Buffer:
    """`data`: uint8, what lies at `address`."""

    address: int
    data: Array
    writable: bool = True
    name: str = ""

    @property
    def end(self) -> int:
        """The first address past it."""
        return self.address + len(self.data)


def _address(buffer: Buffer) -> int:
    return buffer.address


@dataclass
class Memory:
    """All buffers that a kernel may touch."""

    buffers: list[Buffer] = field(default_factory=list)
    """In the order of their addresses."""
    _bounds: tuple[Array, Array] | None = None

    def add(self, address: int, data: Array, writable: bool = True, name: str = "") -> None:
        """A buffer of uint8 at this address; ValueError where it overlaps another."""
        made = Buffer(address, data, writable, name)
        place = bisect.bisect(self.buffers, address, key=_address)
        for other in self.buffers[max(place - 1, 0) : place + 1]:
            if made.address < other.end and other.address < made.end:
                raise ValueError(f"buffers {name} and {other.name} overlap")
        self.buffers.insert(place, made)
        self._bounds = None

    def add_host(self, address: int, size: int, name: str = "") -> None:
        """`size` bytes of this process's own memory, writable. The caller keeps them alive."""
        view = (ctypes.c_uint8 * size).from_address(address)
        self.add(address, np.frombuffer(memoryview(view), np.uint8), name=name)

    def with_(self, *extra: Buffer) -> Memory:
        """These buffers and more."""
        made = Memory(list(self.buffers))
        for each in extra:
            made.add(each.address, each.data, each.writable, each.name)
        return made

    def _of(self, first: int, last: int) -> Buffer | None:
        place = bisect.bisect(self.buffers, first, key=_address) - 1
        return self.buffers[place] if place >= 0 and last <= self.buffers[place].end else None

    def _places(self, addresses: Array, size: int) -> Array:
        """The number of the buffer that each access lies in, -1 for none."""
        if self._bounds is None:
            every = ([each.address for each in self.buffers], [each.end for each in self.buffers])
            self._bounds = (np.array(every[0], np.uint64), np.array(every[1], np.uint64))
        starts, ends = self._bounds
        found = np.searchsorted(starts, addresses, side="right") - 1
        last = ends[found]
        inside = (found >= 0) & (addresses <= last) & (last - addresses >= np.uint64(size))
        return np.where(inside, found, -1)

    def _parts(self, addresses: Array, size: int, store: bool) -> list[tuple[Any, Buffer]]:
        """Which of the addresses lie in which buffer. Raises OutOfBoundsError for the first that
        lies in none.
        """
        whole = self._of(int(addresses.min()), int(addresses.max()) + size)
        if whole is not None:
            parts: list[tuple[Any, Buffer]] = [(slice(None), whole)]
        else:
            places = self._places(addresses, size)
            if places.min() < 0:
                raise OutOfBoundsError(self._complaint(int(np.argmin(places)), addresses, size))
            parts = [(places == each, self.buffers[each]) for each in np.unique(places)]
        for which, each in parts:
            if store and not each.writable:
                lane = int(np.arange(len(addresses))[which][0])
                raise OutOfBoundsError(f"[{lane}] store to {each.name}, which is read-only")
        return parts

    def _complaint(self, at: int, addresses: Array, size: int) -> str:
        address = int(addresses[at])
        near = min(
            self.buffers,
            key=lambda b: min(abs(address - b.address), abs(address - b.end)),
            default=None,
        )
        text = f"[{at}] {size} bytes at {address:#x} lie in no buffer"
        if near is not None:
            text += f"; the nearest is {near.name} {near.address:#x}..{near.end:#x}"
        return text

    def load(self, addresses: Array, size: int) -> Array:
        """(n,) uint64 -> (n, size) uint8, or uint32 words (n, size // 4) where size is divided by
        four and every address is too. Raises OutOfBoundsError, whose message begins with
        [the place of the address].
        """
        words = size % 4 == 0 and not (addresses & np.uint64(3)).any()
        shape = (len(addresses), size // 4 if words else size)
        out = np.empty(shape, np.uint32 if words else np.uint8)
        for which, each in self._parts(addresses, size, store=False):
            source, at, step = self._view(each, addresses[which], words)
            out[which] = source[at[:, None] + np.arange(shape[1])] if step else source[at][:, None]
        return out if words or size % 4 else out.view(np.uint32)

    def store(self, addresses: Array, values: Array) -> None:
        """(n,) uint64 and (n, bytes) uint8. Raises OutOfBoundsError."""
        size = values.shape[1]
        for which, each in self._parts(addresses, size, store=True):
            at = (addresses[which] - np.uint64(each.address)).astype(np.int64)
            if size % 4 == 0 and each.address % 4 == 0 and not (at & 3).any():
                target = each.data[: len(each.data) // 4 * 4].view(np.uint32)
                words = np.ascontiguousarray(values[which]).view(np.uint32)
                target[(at >> 2)[:, None] + np.arange(size // 4)] = words
            else:
                each.data[at[:, None] + np.arange(size)] = values[which]

    @staticmethod
    def _view(each: Buffer, addresses: Array, words: bool) -> tuple[Array, Array, bool]:
        at = (addresses - np.uint64(each.address)).astype(np.int64)
        if words and each.address % 4 == 0:
            return each.data[: len(each.data) // 4 * 4].view(np.uint32), at >> 2, True
        if words:
            raise OutOfBoundsError(f"[0] {each.name} does not begin at a multiple of four")
        return each.data, at, True
