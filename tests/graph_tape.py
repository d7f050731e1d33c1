"""A CPU that records graphs: `Tape` keeps what it was told to launch, and does it again; `Baked`
keeps torch's operations with their memory, as a device does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lib_rocm_sd.graphs import programs
from lib_rocm_sd.graphs.memory import Result

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
    results: list[Result] = field(default_factory=list)

    def tape(self) -> Tape | Baked:
        return Baked(self) if self.baked else Tape(self)

    def new_pool(self, device: torch.device) -> Callable[[], Tape | Baked]:
        self.pools += 1
        return self.tape

    def wait(self, device: torch.device) -> None:
        self.waits += 1


class Tape:
    """Stands for a graph: mirrors lib_rocm_sd.graphs.device.Graph."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def record(self, work: Callable[[], object]) -> None:
        if self._desk.fault is not None:
            raise self._desk.fault
        self._work = work
        self._desk.recorded += 1
        work()

    def replay(self) -> None:
        self._desk.replayed += 1
        made: Any = self._work()
        made.copy_(self._desk.spoil(made))


class Baked:
    """Stands for a graph whose operations read and write the very memory of their recording."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._seen = _Seen(desk)
        self._made: Any = None

    def record(self, work: Callable[[], object]) -> None:
        if self._desk.fault is not None:
            raise self._desk.fault
        self._desk.recorded += 1
        with self._seen:
            self._made = self._seen.kept(work())

    def replay(self) -> None:
        self._desk.replayed += 1
        for func, args, kwargs, made in self._seen.done:
            again = func(*args, **kwargs)
            for old, new in zip(_listed(made), _listed(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        self._made.copy_(self._desk.spoil(self._made))


class _Seen(TorchDispatchMode):
    """Notes what is computed, each tensor as its memory; not what only looks at memory."""

    def __init__(self, desk: Desk) -> None:
        super().__init__()
        self._desk = desk
        self.done: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.set_.source_Storage_storage_offset:
            return func(*args, **(kwargs or {}))
        given, named = self.kept(args), self.kept(kwargs or {})
        made = func(*args, **(kwargs or {}))
        aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
        if all(alias.is_write for alias in aliases):
            self.done.append((func, given, named, self.kept(made)))
        return made

    def kept(self, item: Any) -> Any:
        """Another tensor of the same memory; one that does not hold it where others lend it. Of
        lists likewise: torch's own `tree_map` was a quarter of the time.
        """
        if isinstance(item, (tuple, list)):
            return type(item)([self.kept(each) for each in item])
        if isinstance(item, dict):
            return {name: self.kept(each) for name, each in item.items()}
        if not isinstance(item, torch.Tensor):
            return item
        lent = any(result.holds(item) for result in self._desk.results)
        return _unowned(item) if lent else _detached(item)


def _unowned(item: torch.Tensor) -> torch.Tensor:
    """Of the same memory, as a device sees it: by its address."""
    values = 1 + sum((n - 1) * step for n, step in zip(item.shape, item.stride(), strict=True))
    memory = (ctypes.c_char * (values * item.element_size())).from_address(item.data_ptr())
    return torch.frombuffer(memory, dtype=item.dtype).as_strided(item.shape, item.stride())


def _detached(item: Any) -> Any:
    """Another tensor of the same memory, which stays there when the item is moved."""
    return torch.ops.aten.detach.default(item) if isinstance(item, torch.Tensor) else item


def _listed(made: Any) -> list[Any]:
    return list(made) if isinstance(made, (tuple, list)) else [made]


def recording_cpu(monkeypatch: pytest.MonkeyPatch, baked: bool = False) -> Desk:
    """From now on the CPU is a device that graphs are recorded on."""
    desk = Desk(baked=baked)

    def result(*given: Any) -> Result:
        desk.results.append(Result(*given))
        return desk.results[-1]

    monkeypatch.setattr(programs, "obstacle", lambda device, wish: OFF if wish is False else "")
    monkeypatch.setattr(programs, "stream_of", lambda device: desk.stream)
    monkeypatch.setattr(programs, "is_free", lambda device: not desk.capturing)
    monkeypatch.setattr(programs, "graphs_of", desk.new_pool)
    monkeypatch.setattr(programs, "synchronize", desk.wait)
    monkeypatch.setattr(programs, "Result", result)
    return desk
