"""The process in which kernels are tried: an access outside of memory or a hang ends it, and not
the host's.

It reads messages (recording.py) from standard input until that ends, and ends with it, so also when
its parent dies. It answers in lines of JSON. Without torch, unless it is asked to take it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.errors import DeviceOutOfMemoryError, LaunchError, RocmSdError
from lib_rocm_sd.ops.base import KernelSpec, Launch
from lib_rocm_sd.runtime import compile_worker, cuda
from lib_rocm_sd.runtime.card import BareCard, BareLauncher, CudaCard, HipCard
from lib_rocm_sd.trials import recording
from lib_rocm_sd.trials.recording import POISON, Contents, Recording, Start
from lib_rocm_sd.trials.verdicts import FAULTED, PASSED, REFUSED, WRONG

FAULTS = frozenset({700, 702, 710, *range(714, 720)})
"""Statuses of HIP and CUDA after which the process can do nothing more on the card."""
GUARD_BYTES = 256
"""Before and after each buffer; a multiple of what allocations are aligned to."""
GUARD = 0xA5
READ_BYTES = 256 << 20
"""Largest buffer read back whole, in bytes; of a larger one, only outputs and inputs are read."""
_NO_DIALOGS = 0x0001 | 0x0002  # SEM_FAILCRITICALERRORS, SEM_NOGPFAULTERRORBOX

Message = tuple[dict[str, Any], list[bytes]]
Say = Callable[[dict[str, Any]], None]


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
    size_bytes = recording.size_bytes
    if recording.far and memory.free_bytes() < 2 * size_bytes:
        return Outcome(skipped=f"{recording.name}: less than {2 * size_bytes >> 20} MiB is free")
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
    allocations: list[int] = []
    try:
        for buffer in recording.buffers:
            whole = memory.allocate(buffer.size + 2 * GUARD_BYTES)
            allocations.append(whole)
            memory.fill(whole, GUARD, GUARD_BYTES)
            memory.fill(whole + GUARD_BYTES + buffer.size, GUARD, GUARD_BYTES)
            full = len(buffer.pieces) == 1 and len(buffer.pieces[0][1]) == buffer.size
            if buffer.size and not full:
                memory.fill(whole + GUARD_BYTES, POISON, buffer.size)
            for offset, data in buffer.pieces:
                memory.write(whole + GUARD_BYTES + offset, data)
        yield [whole + GUARD_BYTES for whole in allocations]
    finally:
        for whole in allocations:
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


class Tester:
    """Tries classes on one card."""

    def __init__(self, card: BareCard, index: int, arch: Arch, say: Say) -> None:
        self._card, self._index, self._say = card, index, say
        self._codes: dict[KernelSpec, bytes] = {}
        self._launch = BareLauncher(card.driver, index, arch, self._codes.__getitem__)
        self._stream = 0

    def test(self, head: dict[str, Any], blobs: Sequence[bytes]) -> dict[str, Any]:
        """The verdict of one class. After a fault the card cannot be used any more."""
        for spec, place in head["codes"]:
            self._codes[recording.spec_of(spec)] = blobs[place]
        answer: dict[str, Any] = {"outcome": PASSED, "error": 0.0, "notes": []}
        try:
            for each, stream in self._runs(list(recording.unpacked(head["rows"], blobs))):
                self._say({"kind": "trying", "problem": each.name})
                came = self._one(each, stream)
                _add(answer, each, came)
                if came.reason:
                    return answer | {"outcome": WRONG, "reason": came.reason}
        except DeviceOutOfMemoryError as error:
            return answer | {"outcome": REFUSED, "reason": str(error), "lasting": False}
        except LaunchError as error:
            outcome = FAULTED if error.status in FAULTS else REFUSED
            return answer | {"outcome": outcome, "reason": str(error), "error": None}
        return answer

    def _runs(self, found: list[Recording]) -> list[tuple[Recording, int]]:
        """All on the default stream, which the WebUI uses; the first also on another."""
        if not self._stream:
            self._stream = self._card.new_stream()
        return [*((each, 0) for each in found), *((each, self._stream) for each in found[:1])]

    def _one(self, each: Recording, stream: int) -> Outcome:
        self._launch.stream = stream
        try:
            return replay(each, self._card, self._launch, self._index)
        except DeviceOutOfMemoryError:
            if each.far:
                return Outcome(skipped=f"{each.name}: the card has too little memory")
            raise


def _add(answer: dict[str, Any], each: Recording, outcome: Outcome) -> None:
    """Keep the one that came nearest to its tolerance; JSON has no infinity."""
    if outcome.skipped:
        answer["notes"].append(outcome.skipped)
        return
    share = outcome.error / each.tolerance if each.tolerance else outcome.error
    if outcome.reason or share >= answer.get("share", 0.0):
        error = outcome.error if outcome.error < float("inf") else None
        answer |= {"share": min(share, 1e300), "error": error, "tolerance": each.tolerance}
    answer["time_ms"] = outcome.time_ms


def opened(head: dict[str, Any], say: Say) -> Any:
    """What tests classes on the card that `head` names. Raises RuntimeError or OSError."""
    row = head["arch"]
    arch = Arch(**{**row, "names": tuple(row["names"])})
    index = int(head["index"])
    if head.get("torch") == "zluda":
        from lib_rocm_sd.trials import zluda_child

        return zluda_child.opened(index, arch, say)
    if head.get("torch"):
        from lib_rocm_sd.trials.torch_child import TorchTester

        return TorchTester(index, arch, say)
    card: BareCard
    if head["backend"] == "cuda":
        card = CudaCard(cuda.library(), index)
    else:
        card = HipCard(compile_worker.load(Path(head["library"])), index)
    return Tester(card, index, arch, say)


def quiet() -> None:
    """A crash leaves no dialog and no file behind."""
    if sys.platform == "win32":
        ctypes.WinDLL("kernel32").SetErrorMode(_NO_DIALOGS)
    else:
        import resource

        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def answers() -> Say:
    """Standard output, for the protocol alone: what libraries print goes to standard error."""
    stream = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def say(row: dict[str, Any]) -> None:
        stream.write(json.dumps(row).encode() + b"\n")

    return say


def _inbox(stream: BinaryIO) -> queue.SimpleQueue[Message]:
    """Messages as they come; the process ends where they end."""
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def read() -> None:
        with suppress(ValueError, OSError):
            while (message := recording.received(stream)) is not None:
                messages.put(message)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return messages


def main() -> int:
    """Serve until the parent ends it."""
    quiet()
    say = answers()
    inbox = _inbox(sys.stdin.buffer)
    head, _ = inbox.get()
    try:
        if head.get("kind") == "load":  # what takes seconds; the card is opened later
            compile_worker.load_before_torch(head["libraries"])
            importlib.import_module("lib_rocm_sd.trials.torch_child")
            head, _ = inbox.get()
        tester = opened(head, say)
    except (RocmSdError, OSError, RuntimeError, ImportError, AttributeError) as error:
        say({"kind": "unusable", "reason": f"{type(error).__name__}: {error}"})
        return 0
    say({"kind": "ready"})
    while True:
        head, blobs = inbox.get()
        try:
            verdict = tester.test(head, blobs)
        except Exception as error:  # of ours: no fault of the kernel
            reason = f"the trial itself failed: {type(error).__name__}: {error}"
            verdict = {"outcome": REFUSED, "reason": reason, "lasting": False}
        say({"kind": "verdict", **verdict})
        if verdict["outcome"] == FAULTED:
            os._exit(0)  # Python would wait for the thread that reads, and abort
