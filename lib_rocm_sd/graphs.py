"""A program's launches, recorded once and then made by one call: graphs of the device.

A graph reads and writes fixed addresses. So what a program is given is copied into memory that
stays, its launches are recorded as they read it there, and what they make is copied out. Programs
share that memory, and the memory that they write, for they run one by one: on the stream that was
current when the first was recorded, under a lock. Elsewhere they are computed launch by launch, as
without graphs.

Before a graph is used it has given the very bytes that the launches gave. docs/unet.md says where
graphs are used, and why not everywhere.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol
from weakref import ref

import torch

from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.memory import recording, synchronize
from lib_rocm_sd.engine.selftest import FAILURES, describe

VARIABLE = "ROCM_SD_GRAPHS"
AMD_BACKENDS = ("hip", "zluda")
FREE_RECORDINGS = 512
"""Of a take-over. More are made only where they were used: one for every so many replays."""
REPLAYS_PER_RECORDING = 8
"""A recording takes the time of so many programs launched one by one, and some more."""
ALIGNMENT = 256
Compute = Callable[..., torch.Tensor]


_pauses = 0
_lock = threading.Lock()


@contextmanager
def paused() -> Iterator[None]:
    """Inside the `with` block everything is launched one by one, in all threads: for who looks at
    launches.
    """
    global _pauses
    with _lock:
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1


class Graph(Protocol):
    """One recording of what `work` launches."""

    def record(self, work: Callable[[], torch.Tensor]) -> None: ...

    def replay(self) -> torch.Tensor:
        """What `work` gave, now of other inputs; until any graph is replayed."""


class TorchGraph:
    """By torch.cuda.CUDAGraph, on a stream of its own and without emptying torch's caches."""

    def __init__(self, device: torch.device, pool: Any, stream: Any) -> None:
        self._graph, self._pool, self._stream = torch.cuda.CUDAGraph(), pool, stream
        self._device = device
        self._start = partial(torch._C._CUDAGraph.replay, self._graph)
        self._made = torch.empty(0)

    def record(self, work: Callable[[], torch.Tensor]) -> None:
        """Other threads may allocate meanwhile."""
        home = torch.cuda.current_stream(self._device)
        with recording, torch.cuda.stream(self._stream):
            self._stream.wait_stream(home)
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._made = _unowned(work())
            finally:
                self._graph.capture_end()

    def replay(self) -> torch.Tensor:
        self._start()
        return self._made


class _Memory:
    """A tensor's place and layout, without the tensor: as numba and others describe it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.element_size() for stride in tensor.stride()),
            "typestr": "<i2",
            "version": 2,
        }


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory of a half tensor, which other graphs may write to as soon as it is gone."""
    seen = torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
    if seen.data_ptr() != tensor.data_ptr():
        raise RuntimeError("this torch copies what it is only to look at")
    return seen


class Slot:
    """Memory that stays, as one shape, for what programs are given under one name."""

    __slots__ = ("_at", "_source", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._source: Any = None
        self._at = (0, 0)

    def fill(self, given: torch.Tensor, buffer: _Buffer) -> None:
        """Copy `given`, unless it was the last one and has not changed."""
        counted = not given.is_inference()
        known = counted and buffer.holds is self and self._source() is given
        if known and self._at == (given._version, given.data_ptr()):
            return
        buffer.holds = None
        self.tensor.copy_(given)
        if counted:
            self._source, self._at = ref(given), (given._version, given.data_ptr())
            buffer.holds = self


class _Buffer:
    """Bytes that slots of one name share. `holds`: whose values are in it, if that is known."""

    def __init__(self, n_bytes: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # else it could not be written to outside of it
            self.memory = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        self.holds: Slot | None = None
        self._slots: dict[Any, Slot] = {}

    def slot(self, like: torch.Tensor) -> Slot:
        """With the shape, strides and dtype of `like`."""
        layout = (like.shape, like.stride(), like.dtype)
        if layout not in self._slots:
            with torch.inference_mode(False):
                flat = self.memory[: _span_bytes(like)].view(like.dtype)
                self._slots[layout] = Slot(flat.as_strided(like.shape, _strides(like)))
        return self._slots[layout]


@dataclass(eq=False)
class Recording:
    """What one program launches. It is right as long as `held` are the same objects: what it reads
    beside what it is given. `rows`: of the report, one for each call in it.
    """

    graph: Graph
    held: tuple[Any, ...]
    slots: dict[str, tuple[Slot, _Buffer]]
    rows: list[Any]
    routes: Any
    """A weak reference to whom it belongs."""

    @property
    def is_wanted(self) -> bool:
        """False where nobody will replay it any more."""
        routes = self.routes()
        return routes is not None and routes.recordings.get(self.held) is self

    def replay(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        for name, (slot, buffer) in self.slots.items():
            slot.fill(given[name], buffer)
        return self.graph.replay().clone()


class DeviceGraphs:
    """Those of one device."""

    def __init__(self, device: torch.device, tell: Callable[[str], None]) -> None:
        self._device, self._tell = device, tell
        self._lock = threading.Lock()
        self._buffers: dict[str, _Buffer] = {}
        self._home = stream_of(device)
        self._new = graphs_of(device)
        self._kept: list[Recording] = []
        self.recorded = self.replays = 0
        self.why = ""
        """Why no more are recorded."""

    def __str__(self) -> str:
        why = f"; {self.why}" if self.why else ""
        kept = f"{self.n_bytes >> 20} MiB for what they read"
        return f"graphs: {self.recorded} recorded, {self.replays} replays, {kept}{why}"

    @property
    def n_bytes(self) -> int:
        """What is kept for what programs are given."""
        return sum(buffer.memory.numel() for buffer in self._buffers.values())

    @property
    def is_here(self) -> bool:
        """Whether a replay is possible now."""
        return not _pauses and stream_of(self._device) == self._home and is_free(self._device)

    def replay(self, recording: Recording, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with self._lock:
            made = recording.replay(given)
        for row in recording.rows:
            row.calls += 1
        self.replays += 1
        return made

    def may_record(self) -> bool:
        paid = FREE_RECORDINGS + self.replays // REPLAYS_PER_RECORDING
        return not self.why and self.recorded < paid

    def record(
        self,
        compute: Callable[..., tuple[torch.Tensor, list[Any]]],
        held: tuple[Any, ...],
        given: Mapping[str, torch.Tensor],
        expected: torch.Tensor,
        routes: Any,
    ) -> None:
        """Record `compute(**given)` for `routes`; it gives its result and the rows of its calls.

        If that fails, or gives other bytes than `expected`, nothing more is recorded. Nothing is
        done where a place of it has no route yet (KeyError).
        """
        with self._lock:
            self.recorded += 1
            try:
                self._sweep()
                made = self._recording(compute, held, given, routes)
                same = _equal(made.replay(given), expected)
            except KeyError:
                return
            except FAILURES as error:
                self._end(describe(error))
                return
            if same:
                self._kept.append(made)
                routes.recordings[held] = made
            else:
                self._end("a graph gave other values than its launches")

    def _recording(
        self, compute: Any, held: Any, given: Mapping[str, torch.Tensor], routes: Any
    ) -> Recording:
        slots = {name: self._slot(name, tensor) for name, tensor in given.items()}
        inputs = {name: slot.tensor for name, (slot, _) in slots.items()}
        graph = self._new()
        rows: list[Any] = []

        def work() -> torch.Tensor:
            made, rows[:] = compute(**inputs)
            return made

        with torch.autocast(self._device.type, enabled=False):
            graph.record(work)
        return Recording(graph, held, slots, rows, ref(routes))

    def _slot(self, name: str, like: torch.Tensor) -> tuple[Slot, _Buffer]:
        buffer, wanted = self._buffers.get(name), _span_bytes(like)
        if buffer is None or buffer.memory.numel() < wanted:
            buffer = self._buffers[name] = _Buffer(wanted, self._device)
        return buffer.slot(like), buffer

    def _sweep(self) -> None:
        """Let go of recordings that nobody wants, when none of them is running any more."""
        gone = [made for made in self._kept if not made.is_wanted]
        if gone:
            synchronize(self._device)
            self._kept = [made for made in self._kept if made not in gone]
        if not self._kept:  # torch ends their memory with the last of them
            self._new = graphs_of(self._device)

    def _end(self, why: str) -> None:
        self.why = why
        self._tell(f"the UNet's blocks are launched one by one: {why}")


class Graphs:
    """Those of one take-over, by device. `wish`: whether there are to be any; None: where they are
    known to be right.
    """

    def __init__(self, tell: Callable[[str], None], wish: bool | None = None) -> None:
        self._tell, self.wish = tell, wish
        self._of: dict[torch.device, DeviceGraphs | None] = {}

    def of(self, device: torch.device) -> DeviceGraphs | None:
        """None where none are wanted or possible; `obstacle` says why."""
        try:
            return self._of[device]
        except KeyError:
            made = None if obstacle(device, self.wish) else DeviceGraphs(device, self._tell)
            return self._of.setdefault(device, made)

    def why_not(self, device: torch.device) -> str:
        """Why launches on `device` are not recorded, or no more; empty where they are."""
        made = self._of.get(device)
        return obstacle(device, self.wish) or ("" if made is None else made.why)

    def known(self) -> list[DeviceGraphs]:
        return [made for made in self._of.values() if made is not None]

    def forget(self) -> None:
        """Let all of them go, when none is running any more."""
        for device, made in self._of.items():
            if made is not None:
                with suppress(RuntimeError):
                    synchronize(device)
        self._of = {}


def obstacle(device: torch.device, wish: bool | None = None) -> str:
    """Why no graphs are recorded on `device`; empty where they are. The environment goes before
    `wish`.
    """
    wish = {"0": False, "1": True}.get(os.environ.get(VARIABLE, ""), wish)
    if device.type != "cuda":
        return "graphs are for GPUs"
    if wish is False:
        return "graphs are off"
    if identify(device).backend in AMD_BACKENDS and wish is None:
        return "HIP's graphs are used only where they are asked for"
    if torch.__version__.startswith(("1.", "2.0.")):
        return "this torch's graphs would disturb other threads"
    return ""


def graphs_of(device: torch.device) -> Callable[[], Graph]:
    """What makes empty graphs that share their memory."""
    pool, stream = torch.cuda.graph_pool_handle(), _recording_stream(device)
    return lambda: TorchGraph(device, pool, stream)


@cache
def _recording_stream(device: torch.device) -> Any:
    """One for the process: torch keeps a workspace of its libraries for each stream, for good."""
    return torch.cuda.Stream(device)


def _stream_of(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def stream_of(device: torch.device) -> int:
    """The handle of torch's current stream, in the cheapest form that this torch has."""
    if _raw_stream is None or device.index is None:
        return _stream_of(device)
    return _raw_stream(device.index)


_current: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def is_free(device: torch.device) -> bool:
    """Whether `device` is the current one, and nobody else records what is launched on it."""
    return _current() == device.index and not torch.cuda.is_current_stream_capturing()


def _strides(like: torch.Tensor) -> tuple[int, ...]:
    """Those of `like`, or where it is expanded, of a copy."""
    expanded = 0 in like.stride()
    return torch.empty(like.shape, device="meta").stride() if expanded else like.stride()


def _span_bytes(like: torch.Tensor) -> int:
    """From the first element to the last, rounded up."""
    strides = _strides(like)
    last = sum((size - 1) * stride for size, stride in zip(like.shape, strides, strict=True))
    n_bytes = (last + 1) * like.element_size()
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def _equal(made: torch.Tensor, expected: torch.Tensor) -> bool:
    """The same bytes; NaN equals itself."""
    return made.shape == expected.shape and torch.equal(
        made.view(torch.int16), expected.view(torch.int16)
    )
