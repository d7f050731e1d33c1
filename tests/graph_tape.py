"""A CPU that records graphs: `Tape` keeps what it was told to launch, and does it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from lib_rocm_sd import graphs

OFF = "graphs are off"


@dataclass
class Desk:
    """What a device would do for graphs. `spoil`: what becomes of what a replay makes; `fault`:
    what a recording raises.
    """

    stream: int = 7
    capturing: bool = False
    recorded: int = 0
    replayed: int = 0
    waits: int = 0
    pools: int = 0
    spoil: Callable[[torch.Tensor], torch.Tensor] = field(default=lambda made: made)
    fault: Exception | None = None

    def tape(self) -> Tape:
        return Tape(self)

    def new_pool(self, device: torch.device) -> Callable[[], Tape]:
        self.pools += 1
        return self.tape

    def wait(self, device: torch.device) -> None:
        self.waits += 1


class Tape:
    """Stands for a graph: mirrors lib_rocm_sd.graphs.Graph."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def record(self, work: Callable[[], torch.Tensor]) -> None:
        if self._desk.fault is not None:
            raise self._desk.fault
        self._work = work
        self._desk.recorded += 1
        work()

    def replay(self) -> torch.Tensor:
        self._desk.replayed += 1
        return self._desk.spoil(self._work())


def recording_cpu(monkeypatch: pytest.MonkeyPatch) -> Desk:
    """From now on the CPU is a device that graphs are recorded on."""
    desk = Desk()
    monkeypatch.setattr(graphs, "obstacle", lambda device, wish: OFF if wish is False else "")
    monkeypatch.setattr(graphs, "stream_of", lambda device: desk.stream)
    monkeypatch.setattr(graphs, "is_free", lambda device: not desk.capturing)
    monkeypatch.setattr(graphs, "graphs_of", desk.new_pool)
    monkeypatch.setattr(graphs, "synchronize", desk.wait)
    return desk
