"""Launch what was recorded on a card, and judge it. Needs no torch."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lib_rocm_sd.errors import LaunchError
from lib_rocm_sd.ops.base import Launch
from lib_rocm_sd.trials.recording import POISON, Contents, Recording, Start

GUARD_BYTES = 256
"""Before and after each buffer; a multiple of what allocations are aligned to."""
GUARD = 0xA5
READ_BYTES = 256 << 20
"""Largest buffer read back whole, in bytes; of a larger one, only outputs and inputs are read."""


class Memory(Protocol):
    """What of runtime.card.BareCard is needed here."""

    def allocate(self, size: int) -> int: ...
    def free(self, address: int) -> None: ...
    def write(self, address: int, data: bytes) -> None: ...
    def read(self, address: int, size: int) -> bytes: ...
    def fill(self, address: int, byte: int, size: int) -> None: ...
    def synchronise(self) -> None: ...
    def free_bytes(self) -> int: ...


@dataclass(frozen=True)
class Device:
    """A device by its number, in place of torch's."""

    index: int


@dataclass(frozen=True)
class Outcome:
    """`reason` is empty where all was right; `skipped` says why nothing was launched."""

    error: float = 0.0
    reason: str = ""
    time_ms: float = 0.0
    skipped: str = ""


def replay(recording: Recording, memory: Memory, launch: Launch, index: int) -> Outcome:
    """Run it once. Raises LaunchError and DeviceOutOfMemoryError."""
    if recording.unmade:
        return Outcome(skipped=f"{recording.name}: {recording.unmade}")
    wanted = recording.size_bytes
    if recording.far and memory.free_bytes() < 2 * wanted:
        return Outcome(skipped=f"{recording.name}: less than {2 * wanted >> 20} MiB is free")
    with _allocated(recording, memory) as places:
        memory.synchronise()
        begin = time.perf_counter()
        for start in recording.starts:
            _launch(start, places, launch, index)
        memory.synchronise()
        time_ms = 1e3 * (time.perf_counter() - begin)
        reason = _guards(recording, memory, places)
        contents = {
            number: _contents(recording, number, memory, place)
            for number, place in enumerate(places)
        }
    error = recording.error(contents)
    reason = reason or recording.misplaced(contents) or _wrong(error, recording.tolerance)
    return Outcome(error, f"{recording.name}: {reason}" if reason else "", time_ms)


def _contents(recording: Recording, number: int, memory: Memory, place: int) -> Contents:
    size = recording.buffers[number].size
    if size <= READ_BYTES:
        return np.frombuffer(memory.read(place, size), np.uint8)
    return {(at, count): memory.read(place + at, count) for at, count in recording.runs(number)}


def _wrong(error: float, tolerance: float) -> str:
    if error <= tolerance:
        return ""
    what = f"wrong by {error:.2g}" if np.isfinite(error) else "NaN or infinity"
    return f"{what}, the tolerance is {tolerance:.2g}"


@contextmanager
def _allocated(recording: Recording, memory: Memory) -> Iterator[list[int]]:
    """The buffers' addresses."""
    taken: list[int] = []
    try:
        for buffer in recording.buffers:
            whole = memory.allocate(buffer.size + 2 * GUARD_BYTES)
            taken.append(whole)
            memory.fill(whole, GUARD, GUARD_BYTES)
            memory.fill(whole + GUARD_BYTES + buffer.size, GUARD, GUARD_BYTES)
            full = len(buffer.pieces) == 1 and len(buffer.pieces[0][1]) == buffer.size
            if buffer.size and not full:
                memory.fill(whole + GUARD_BYTES, POISON, buffer.size)
            for offset, data in buffer.pieces:
                memory.write(whole + GUARD_BYTES + offset, data)
        yield [whole + GUARD_BYTES for whole in taken]
    finally:
        for whole in taken:
            with suppress(LaunchError):  # after a fault nothing can be freed, nor need be
                memory.free(whole)


def _launch(start: Start, places: Sequence[int], launch: Launch, index: int) -> None:
    arguments = bytearray(start.arguments)
    for each in start.addresses:
        address = places[each.buffer] + each.offset
        arguments[each.at : each.at + 8] = address.to_bytes(8, "little")
    params: Any = (ctypes.c_char * len(arguments)).from_buffer_copy(arguments)
    where: Any = Device(index)
    launch(start.spec, start.grid, start.block, params, where)


def _guards(recording: Recording, memory: Memory, places: Sequence[int]) -> str:
    """What was written before or after a buffer."""
    whole = bytes([GUARD]) * GUARD_BYTES
    for buffer, place in zip(recording.buffers, places, strict=True):
        if memory.read(place - GUARD_BYTES, GUARD_BYTES) != whole:
            return "wrote before its output"
        if memory.read(place + buffer.size, GUARD_BYTES) != whole:
            return "wrote behind its output"
    return ""
