"""What was recorded of programs, and by whom it is replayed.

Programs run one by one: on the stream that was current when the first was recorded, under a lock.
Elsewhere they are computed launch by launch, as without graphs. Before a graph is used it has given
the very bytes that the launches gave.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch

from lib_rocm_sd.engine.memory import synchronize, with_index
from lib_rocm_sd.engine.selftest import FAILURES, describe
from lib_rocm_sd.graphs.device import Graph, graphs_of, is_free, is_paused, obstacle, stream_of
from lib_rocm_sd.graphs.memory import (
    COPIED,
    LENT,
    OWN,
    Buffer,
    Copied,
    Direct,
    Layout,
    Read,
    Result,
    Settled,
    span_bytes,
)

FREE_RECORDINGS = 512
"""Free recordings per take-over and device. Beyond these, REPLAYS_PER_RECORDING replays pay for
each new one.
"""
REPLAYS_PER_RECORDING = 8
"""A recording takes the time of so many programs launched one by one, and some more."""
MISSES = 2
"""After so many, a recording is made anew that does not need what was not in its place."""
STEADY = 64
"""Copies in a row from one address, after which a recording is made anew that reads there: more
than a usual picture has steps.
"""
Compute = Callable[..., torch.Tensor]
Recorded = Callable[..., tuple[torch.Tensor, list[Any]]]
Reads = Mapping[str, Read]
RESULT, OTHERS = "its result", "another's result"
"""Among the names of what a program is given: what it makes, and what is made in the same place."""


@dataclass(eq=False)
class Recording:
    """What one program launches. It is right as long as `held` are the same objects: what it reads
    beside what it is given. `rows`: of the report, one for each call in it.
    """

    graph: Graph
    held: tuple[Any, ...]
    reads: Reads
    result: Result
    made: torch.Tensor
    """What it makes, where it makes it."""
    rows: list[Any]
    routes: Any
    """A weak reference to whom it belongs."""
    misses: int = 0

    @property
    def is_wanted(self) -> bool:
        """False where nobody will replay it any more."""
        routes = self.routes()
        gone = any(isinstance(each, ref) and each() is None for each in self.held)
        return not gone and routes is not None and routes.recordings.get(self.held) is self

    @property
    def memory(self) -> list[Result]:
        """Where it reads and writes."""
        reads = [read.result for read in self.reads.values() if isinstance(read, Direct)]
        return [*reads, self.result]

    def obstacle(self, given: Mapping[str, torch.Tensor]) -> str | None:
        """The name of what is not where it was when this was recorded. What is copied is copied."""
        for name, read in self.reads.items():
            if not read.takes(given[name]):
                return name
        result = self.result
        if not result.is_whole:
            return RESULT
        if result.use == COPIED or not result.is_held:
            return None
        return RESULT if result.lender is self.routes else OTHERS

    def replay(self) -> torch.Tensor:
        """Replay the graph and return its result. `obstacle` must have found all in its place."""
        self.graph.replay()
        if self.result.use == COPIED:
            return self.made.clone()
        self.result.lender = self.routes
        return self.made.data

    @property
    def steady(self) -> list[str]:
        """What was copied from one place often enough."""
        return [name for name, read in self.reads.items() if read.steady >= STEADY]


class DeviceGraphs:
    """Those of one device."""

    def __init__(self, device: torch.device, tell: Callable[[str], None]) -> None:
        self._device, self._tell = device, tell
        self._lock = threading.Lock()
        self._buffers: dict[str, Buffer] = {}
        self._results: list[Result] = []
        self._home = stream_of(device)
        self._new = graphs_of(device)
        self._kept: list[Recording] = []
        self.recorded = self.replays = 0
        self.why = ""
        """Why no more are recorded."""

    def __str__(self) -> str:
        why = f"; {self.why}" if self.why else ""
        size = f"{self.n_bytes >> 20} MiB for what they read and make"
        return f"graphs: {self.recorded} recorded, {self.replays} replays, {size}{why}"

    @property
    def n_bytes(self) -> int:
        """What is kept for what programs are given, and for what they make."""
        input_bytes = sum(buffer.memory.numel() for buffer in self._buffers.values())
        return input_bytes + sum(result.n_bytes for result in self._results)

    @property
    def is_here(self) -> bool:
        """Whether a replay is possible now."""
        return not is_paused() and stream_of(self._device) == self._home and is_free(self._device)

    def replay(
        self, recording: Recording, given: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """None where something is not in its place. When that happens again, it is to be recorded
        anew, so that it need not be there; and so it is to read without a copy what always lies
        in one place.
        """
        with self._lock:
            name = recording.obstacle(given)
            if name is not None:
                recording.misses += 1
                if recording.misses >= MISSES and self.may_record():
                    _leave(recording, name)
                return None
            result = recording.replay()
            steady = recording.steady
            if steady and self.may_record():
                _settle(recording, frozenset(steady))
        for row in recording.rows:
            row.calls += 1
        self.replays += 1
        return result

    def may_record(self) -> bool:
        paid = FREE_RECORDINGS + self.replays // REPLAYS_PER_RECORDING
        return not self.why and self.recorded < paid

    def record(
        self,
        compute: Recorded,
        held: tuple[Any, ...],
        given: Mapping[str, torch.Tensor],
        expected: torch.Tensor,
        routes: Any,
    ) -> torch.Tensor:
        """Record `compute(into, **given)` for `routes`; it gives its result, which may lie in
        `into`, and the rows of its calls. What comes back equals `expected`, and lies where it will
        lie.

        If that fails, or gives other bytes than `expected`, nothing more is recorded. Nothing is
        done where a place of it has no route yet (KeyError).
        """
        with self._lock:
            self.recorded += 1
            try:
                self._sweep()
                recording = self._recording(compute, held, given, expected, routes)
                recording.obstacle(given)
                result = recording.replay()
                same = _equal(result, expected)
            except KeyError:
                return expected
            except FAILURES as error:
                self._end(describe(error))
                return expected
            if not same:
                self._end("a graph gave other values than its launches")
                return expected
            self._kept.append(recording)
            routes.recordings[held], routes.result = recording, recording.result
            return result

    def _recording(
        self,
        compute: Recorded,
        held: Any,
        given: Mapping[str, torch.Tensor],
        expected: torch.Tensor,
        routes: Any,
    ) -> Recording:
        reads, inputs = self._placed(given, routes.moves, routes.settled)
        layout, result = Layout.of(expected), self._result(expected, routes)
        graph = self._new()
        rows: list[Any] = []

        def work() -> torch.Tensor:
            into = result.tensor(layout)
            made, rows[:] = compute(into, **inputs)
            return made if made.data_ptr() == into.data_ptr() else into.copy_(made)

        with torch.autocast(self._device.type, enabled=False):
            graph.record(work)
        return Recording(graph, held, reads, result, result.whole(layout), rows, ref(routes))

    def _placed(
        self, given: Mapping[str, torch.Tensor], moves: Container[str], settled: Container[str]
    ) -> tuple[dict[str, Read], dict[str, torch.Tensor]]:
        """How each is read, and what is to be read while it is recorded."""
        reads: dict[str, Read] = {}
        inputs = dict(given)
        for name, tensor in given.items():
            result = next((each for each in self._results if each.holds(tensor)), None)
            if result is not None and name not in moves and Direct.suits(tensor):
                reads[name] = Direct(result, tensor)
                continue
            may_settle = name not in moves and Direct.suits(tensor)
            if name in settled and may_settle:
                reads[name] = Settled(tensor)
                continue
            buffer, n_bytes = self._buffers.get(name), span_bytes(tensor)
            if buffer is None or buffer.memory.numel() < n_bytes:
                buffer = self._buffers[name] = Buffer(n_bytes, self._device)
            slot = buffer.slot(tensor)
            reads[name], inputs[name] = Copied(slot, buffer, may_settle), slot.tensor
        return reads, inputs

    def _result(self, like: torch.Tensor, routes: Any) -> Result:
        """Memory that nobody holds: where it was before, else the smallest that is large enough and
        not much larger, for what is kept in it keeps all of it.
        """
        n_bytes, moves = span_bytes(like), routes.moves
        use = COPIED if RESULT in moves else OWN if OTHERS in moves else LENT
        shared = [each for each in self._results if use != OWN]
        shared.sort(key=lambda each: each.n_bytes)
        before = [] if routes.result is None else [routes.result]
        for result in before + shared:
            fits = (
                n_bytes <= result.n_bytes <= 2 * n_bytes and result.use == use and result.is_whole
            )
            if fits and (use == COPIED or not result.is_held):
                break
        else:
            result = Result(n_bytes, self._device, use)
        if result not in self._results:
            self._results.append(result)
        return result

    def _sweep(self) -> None:
        """Let go of recordings that nobody wants, when none of them is running any more."""
        gone = [made for made in self._kept if not made.is_wanted]
        if gone:
            synchronize(self._device)
            self._kept = [made for made in self._kept if made not in gone]
            wanted = [routes.result for routes in (made.routes() for made in gone) if routes]
            wanted += [each for made in self._kept for each in made.memory]
            self._results = [each for each in self._results if each in wanted]
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
            graphs = None if obstacle(device, self.wish) else DeviceGraphs(device, self._tell)
            return self._of.setdefault(device, graphs)

    def why_not(self, device: torch.device) -> str:
        """Why launches on `device` are not recorded, or no more; empty where they are."""
        graphs = self._of.get(with_index(device))
        return obstacle(device, self.wish) or ("" if graphs is None else graphs.why)

    def known(self) -> list[DeviceGraphs]:
        return [graphs for graphs in self._of.values() if graphs is not None]

    def forget(self) -> None:
        """Let all of them go, when none is running any more."""
        for device, graphs in self._of.items():
            if graphs is not None:
                with suppress(RuntimeError):
                    synchronize(device)
        self._of = {}


def _leave(recording: Recording, name: str) -> None:
    """It is no longer wanted as it is: `name` moves, or has not settled after all."""
    routes = recording.routes()
    routes.recordings.pop(recording.held, None)
    if isinstance(recording.reads.get(name), Settled):
        routes.settled, routes.unsettled = routes.settled - {name}, routes.unsettled | {name}
    else:
        routes.moves = routes.moves | {name}
    if name in (RESULT, OTHERS):
        routes.result = None


def _settle(recording: Recording, names: frozenset[str]) -> None:
    """It is no longer wanted as it is, unless that was tried before: these stay where they are."""
    routes = recording.routes()
    names -= routes.unsettled
    if names:
        routes.recordings.pop(recording.held, None)
        routes.settled = routes.settled | names


def _equal(made: torch.Tensor, expected: torch.Tensor) -> bool:
    """The same bytes; NaN equals itself."""
    return made.shape == expected.shape and torch.equal(
        made.view(torch.int16), expected.view(torch.int16)
    )
