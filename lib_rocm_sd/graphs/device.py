"""What records on a device, and where that is possible."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol

import torch

from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.memory import is_recording, recording
from lib_rocm_sd.runtime.zluda import CAPTURED

VARIABLE = "ROCM_SD_GRAPHS"

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


def is_paused() -> bool:
    """Whether anybody has paused graphs."""
    return _pauses > 0


class Graph(Protocol):
    """One recording of what `work` launches."""

    def record(self, work: Callable[[], object]) -> None: ...

    def replay(self) -> None:
        """Launch all of it, with what now lies where it read."""


class TorchGraph:
    """By torch.cuda.CUDAGraph, on a stream of its own and without emptying torch's caches."""

    def __init__(self, device: torch.device, pool: Any, stream: Any) -> None:
        with torch.cuda.device(device):  # else it makes a context on the current card
            self._graph = torch.cuda.CUDAGraph()
        self._device, self._pool, self._stream = device, pool, stream
        self.replay: Callable[[], None] = partial(torch._C._CUDAGraph.replay, self._graph)

    def record(self, work: Callable[[], object]) -> None:
        """Other threads may allocate meanwhile."""
        home = torch.cuda.current_stream(self._device)
        with recording, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_stream(home)
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                self._graph.capture_end()


OFF = "graphs are off"


def obstacle(device: torch.device, wish: bool | None = None) -> str:
    """Why no graphs are recorded on `device`; empty where they are. The environment goes before
    `wish`.
    """
    wish = {"0": False, "1": True}.get(os.environ.get(VARIABLE, ""), wish)
    if device.type != "cuda":
        return "graphs are for GPUs"
    if wish is False:
        return OFF
    backend = identify(device).backend
    if backend == "zluda":
        return CAPTURED
    if backend == "hip" and wish is None:
        return "HIP's graphs are used only where they are asked for"
    if torch.__version__.startswith(("1.", "2.0.")):
        return "this torch's graphs would disturb other threads"
    return ""


def graphs_of(device: torch.device) -> Callable[[], Graph]:
    """What makes empty graphs that share the memory of what they compute in between."""
    pool, stream = torch.cuda.graph_pool_handle(), _recording_stream(device)
    return lambda: TorchGraph(device, pool, stream)


@cache
def _recording_stream(device: torch.device) -> Any:
    """One for the process: torch keeps a workspace of its libraries for each stream, for good."""
    return torch.cuda.Stream(device)


_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def stream_of(device: torch.device) -> int:
    """The handle of torch's current stream, in the cheapest form that this torch has."""
    if _raw_stream is None or device.index is None:
        return int(torch.cuda.current_stream(device).cuda_stream)
    return _raw_stream(device.index)


_current: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def is_free(device: torch.device) -> bool:
    """Whether nobody else records what is launched on `device`."""
    if _current() == device.index:
        return not torch.cuda.is_current_stream_capturing()
    return not is_recording(device)
