"""A kernel called again and again with tensors that differ only in where they lie.

Between Python and the launch stand then few microseconds: what follows from sizes and strides is
packed once, and a call fills in the addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

P = TypeVar("P", bound=ctypes.Structure)

Prepare = Callable[[ctypes.Structure], Callable[[], None]]
"""Makes a launch of one kernel to be repeated with these arguments."""
Launches = Callable[..., Callable[[], None]]
"""A launcher's `prepare`: of a kernel, its work-groups, their size, arguments and a device."""


class Packet(Generic[P]):
    """Arguments, and the launch that reads them. In use by one call at a time. `state`: what else
    its last call has left in it.
    """

    __slots__ = ("launch", "params", "state")

    def __init__(self, params: P, launch: Callable[[], None]) -> None:
        self.params = params
        self.launch = launch
        self.state: Any = None


class Bound(Generic[P]):
    """A kernel's packets. `first`: its arguments, but for addresses. Threads may call at once: each
    takes a packet from `free`, or a `new` one, and puts it back after its launch.
    """

    __slots__ = ("_first", "_prepare", "free")

    def __init__(self, first: P, prepare: Prepare) -> None:
        self._first = first
        self._prepare = prepare
        self.free: list[Packet[P]] = []

    def new(self) -> Packet[P]:
        """A packet more."""
        params = type(self._first).from_buffer_copy(self._first)
        return Packet(params, self._prepare(params))

    def taken(self) -> Packet[P]:
        """A packet that no other call has."""
        try:
            return self.free.pop()
        except IndexError:
            return self.new()


def in_a_row(launches: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """All of them, one after the other."""
    if len(launches) == 1:
        return launches[0]

    def launch() -> None:
        for each in launches:
            each()

    return launch
