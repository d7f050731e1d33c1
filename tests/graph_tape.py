"""A CPU that records graphs: `Tape` keeps what it was told to launch, and does it again; `Baked`
keeps torch's operations with their memory, as a device does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

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
    baked: bool = False

    def tape(self) -> Tape | Baked:
        return Baked(self) if self.baked else Tape(self)

    def new_pool(self, device: torch.device) -> Callable[[], Tape | Baked]:
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


class Baked:
    """Stands for a graph whose operations read and write the very memory of their recording."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._seen = _Seen()
        self._made = torch.empty(0)

    def record(self, work: Callable[[], torch.Tensor]) -> None:
        if self._desk.fault is not None:
            raise self._desk.fault
        self._desk.recorded += 1
        with self._seen:
            self._made = _detached(work())

    def replay(self) -> torch.Tensor:
        self._desk.replayed += 1
        for func, args, kwargs, made in self._seen.done:
            again = func(*args, **kwargs)
            for old, new in zip(_listed(made), _listed(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        return self._desk.spoil(self._made)


class _Seen(TorchDispatchMode):
    """Notes what is computed, each tensor as its memory; not what only looks at memory."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, named = tree_map(_detached, args), tree_map(_detached, kwargs or {})
        made = func(*args, **(kwargs or {}))
        aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
        if all(alias.is_write for alias in aliases):
            self.done.append((func, given, named, tree_map(_detached, made)))
        return made


def _detached(item: Any) -> Any:
    """Another tensor of the same memory, which stays there when the item is moved."""
    return torch.ops.aten.detach.default(item) if isinstance(item, torch.Tensor) else item


def _listed(made: Any) -> list[Any]:
    return list(made) if isinstance(made, (tuple, list)) else [made]


def recording_cpu(monkeypatch: pytest.MonkeyPatch, baked: bool = False) -> Desk:
    """From now on the CPU is a device that graphs are recorded on."""
    desk = Desk(baked=baked)
    monkeypatch.setattr(graphs, "obstacle", lambda device, wish: OFF if wish is False else "")
    monkeypatch.setattr(graphs, "stream_of", lambda device: desk.stream)
    monkeypatch.setattr(graphs, "is_free", lambda device: not desk.capturing)
    monkeypatch.setattr(graphs, "graphs_of", desk.new_pool)
    monkeypatch.setattr(graphs, "synchronize", desk.wait)
    return desk
