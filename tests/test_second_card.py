"""The card that is used need not be the current one: nothing of ours touches another one then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib_rocm_sd.cards.memory import Shared
from lib_rocm_sd.engine import measure as times
from lib_rocm_sd.engine import memory
from lib_rocm_sd.graphs import device as graphs
from lib_rocm_sd.graphs import programs
from lib_rocm_sd.lab import timing as lab_timing
from lib_rocm_sd.lab import unet as bench_unet
from lib_rocm_sd.lab.speed_job import PictureWish, Steps
from lib_rocm_sd.vae.store import _Lane

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class Cards:
    """Plays torch.cuda with two cards. `touched`: those that were made to do something, or are
    asked for a context of theirs.
    """

    def __init__(self) -> None:
        self.current = 0
        self.touched: list[tuple[str, int]] = []
        self.capturing: int | None = None
        for name in ("synchronize", "reset_peak_memory_stats"):
            setattr(self, name, partial(self._touch, name))
        for name in ("empty_cache", "_sleep"):
            setattr(self, name, partial(self._touch_current, name))

    def index(self, device: Any = None) -> int:
        index = getattr(device, "index", device)
        return self.current if index is None else int(index)

    def _touch(self, what: str, device: Any = None) -> None:
        self.touched.append((what, self.index(device)))

    def _touch_current(self, what: str, *_: Any) -> None:
        self._touch(what)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, self.index(device)
        yield
        self.current = before

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream.index
        yield
        self.current = before
        if before != stream.index:
            self._touch("torch makes it current")

    def current_device(self) -> int:
        return self.current

    def current_stream(self, device: Any = None) -> Stream:
        return Stream(self, device)

    def Stream(self, device: Any = None) -> Stream:  # noqa: N802 - as torch.cuda has it
        self._touch("a stream", device)
        return Stream(self, device)

    def Event(self, **_: Any) -> Event:  # noqa: N802 - the same
        return Event(self)

    def CUDAGraph(self) -> Any:  # noqa: N802 - the same
        self._touch("a graph is made")  # as two H100s showed
        begin = partial(self._touch_current, "a recording begins")
        return SimpleNamespace(
            capture_begin=lambda **_: begin(), capture_end=partial(self._touch, "a recording ends")
        )

    def is_current_stream_capturing(self) -> bool:
        return self.capturing == self.current

    def is_available(self) -> bool:
        return True

    def memory_allocated(self, device: Any = None) -> int:
        return 0

    max_memory_allocated = memory_allocated

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return [
            {"device": index, "segment_pool_id": (0, 1), "total_size": size, "allocated_size": 0}
            for index, size in ((0, 70), (1, 5))
        ]

    def cudart(self) -> Any:
        def register(*_: Any) -> int:
            self._touch("host memory")
            return 0

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=register)


class Stream:
    def __init__(self, cards: Cards, device: Any) -> None:
        self._cards, self.index = cards, cards.index(device)

    def wait_stream(self, other: Stream) -> None:
        self._cards._touch("a stream waits", self.index)
        self._cards._touch("a stream is waited for", other.index)

    def wait_event(self, event: Any) -> None:
        self._cards._touch("a stream waits", self.index)

    def record_event(self) -> Event:
        made = Event(self._cards)
        made.record(self)
        return made


class Event:
    def __init__(self, cards: Cards) -> None:
        self._cards = cards

    def record(self, stream: Stream | None = None) -> None:
        self._cards._touch("an event", None if stream is None else stream.index)

    def query(self) -> bool:
        return False

    def elapsed_time(self, other: Event) -> float:
        return 1.0


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cards]:
    made = Cards()
    monkeypatch.setattr(torch, "cuda", made)
    monkeypatch.setattr(torch._C, "_CUDAGraph", SimpleNamespace(replay=print))
    monkeypatch.setattr(graphs, "_current", made.current_device)
    times._cycles_per_s.cache_clear()
    yield made
    times._cycles_per_s.cache_clear()


def one_call(number: int) -> None:
    assert torch.cuda.current_device() == SECOND.index


def times_of_steps() -> None:
    wish = PictureWish(2, 64, True, False, lambda share: None, lambda: False)
    steps = Steps(wish, SECOND)
    steps.note(0)
    steps.note(1)
    assert steps.per_second() == 1000.0


def copies_beside_the_work() -> None:
    lane = _Lane(SECOND)
    lane.wait(lane.copy([], []))


def a_recording() -> None:
    stream: Any = torch.cuda.Stream(SECOND)
    graphs.TorchGraph(SECOND, None, stream).record(partial(one_call, 0))


def pinned_memory() -> None:
    made = Shared(1 << 12)
    assert made.pin(SECOND)
    made.close()


WORK: list[Callable[[], object]] = [
    partial(times.timed, one_call, 2, SECOND),
    partial(times.queued, one_call, 2, SECOND, 1e-6),
    partial(lab_timing.timed_with_a_full_queue, one_call, 2, SECOND),
    partial(memory.empty_cache, SECOND),
    partial(lab_timing.clean, SECOND),
    lambda: lab_timing.Peak(SECOND).mib(),
    times_of_steps,
    copies_beside_the_work,
    a_recording,
    pinned_memory,
]


@pytest.mark.parametrize("work", WORK)
def test_only_the_card_that_is_used_is_touched(work: Callable[[], object], cards: Cards) -> None:
    work()
    assert {index for _, index in cards.touched} == {SECOND.index}, cards.touched
    assert cards.current == FIRST.index


def test_a_card_without_a_number_is_the_current_one(cards: Cards) -> None:
    cards.current = 1
    times.queued(one_call, 2, torch.device("cuda"), 1e-6)
    assert {index for _, index in cards.touched} == {1}
    assert memory.with_index(torch.device("cuda")) == SECOND


def test_another_card_than_the_current_one_may_record(cards: Cards) -> None:
    assert graphs.is_free(SECOND) and graphs.is_free(FIRST)
    cards.capturing = 1
    assert not graphs.is_free(SECOND) and graphs.is_free(FIRST)
    cards.capturing = 0
    assert graphs.is_free(SECOND) and not graphs.is_free(FIRST)


def test_what_graphs_keep_is_counted_by_card(cards: Cards) -> None:
    assert (bench_unet._pooled(FIRST), bench_unet._pooled(SECOND)) == (70, 5)


def test_why_nothing_is_recorded_is_known_by_a_card_without_a_number(
    cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the WebUI calls it where no --device-id is given."""
    why = "a graph gave other values than its launches"
    made: Any = SimpleNamespace(why=why)
    monkeypatch.setattr(programs, "obstacle", lambda device, wish: "")
    monkeypatch.setattr(programs, "DeviceGraphs", lambda device, tell: made)
    known = programs.Graphs(print)
    assert known.of(FIRST) is made
    assert known.why_not(torch.device("cuda")) == why
