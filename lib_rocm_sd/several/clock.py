"""What calls take that several cards compute, for who divides the next one."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Any

import torch

from lib_rocm_sd.several.shares import Shares, Way


class Clock:
    """Times calls on `home`: what a device takes is known when the next call asks."""

    def __init__(self, home: torch.device, shares: Shares) -> None:
        self._on_device, self._shares = home.type == "cuda", shares
        self._home = home
        self._pending: list[tuple[Hashable, Way, list[Any], dict[int, float]]] = []
        self._each: dict[int, float] = {}
        self._now: tuple[Hashable, Way] = ((), ())
        self._marks: list[Any] = []

    def of(self, kind: Hashable, way: Way) -> Clock:
        """To be entered around a call. One that raises is not counted."""
        self._now, self._each, self._marks = (kind, way), {}, []
        return self

    def took(self, card: int, ms: float) -> None:
        """What a card took for its part."""
        self._each[card] = ms

    def own_begins(self) -> None:
        """The others have been asked. Not told where `took` says what one's own card took."""
        self._mark()

    def own_is_done(self) -> None:
        """One's own part is computed, or will be when the device comes so far."""
        self._mark()

    def __enter__(self) -> Clock:
        self._settle()
        self._mark()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._mark()
        if kind is None:
            self._pending.append((*self._now, self._marks, self._each))
            self._settle()

    def _mark(self) -> None:
        if not self._on_device:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._home))
        self._marks.append(event)

    def _settle(self) -> None:
        while self._pending:
            kind, way, marks, each = self._pending[0]
            if self._on_device and not marks[-1].query():
                return
            self._pending.pop(0)
            own = {0: self._between(marks[1], marks[2])} if len(marks) > 3 else {}
            times = {**own, **each}
            row = [times.get(card, 0.0) for card in range(len(way))]
            self._shares.took(kind, way, self._between(marks[0], marks[-1]), row)

    def _between(self, first: Any, last: Any) -> float:
        """In ms."""
        if self._on_device:
            return float(first.elapsed_time(last))
        return 1000 * float(last - first)
