"""Compares blocks of ours with the host's own: one call of one block of each kind in a generation.

What the host would compute depends on more than can be watched (modules/watch.py). So a call now
and then is made by the host's own forward, with all that sits in it, and that result is used. Ours
is computed beside it, from the same input, and compared on the device, which nobody waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lib_rocm_sd.engine.memory import is_recording
from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.modules.compared import difference, epsilon, norms, without_search

STEPS = 20
"""After which another round begins where nobody says that a generation does."""


@dataclass(frozen=True)
class _Pending:
    """A comparison on its way from the device: the norms of the difference, of what the block adds
    and of its result. `arrived(wait)`: whether they are here.
    """

    block: Any
    norms: torch.Tensor
    epsilon: float
    arrived: Callable[[bool], bool]


@dataclass
class SpotCheck:
    """The comparisons of one take-over, whose blocks are of several kinds: `block.kind.title`.

    `differs(block, how)` is told of a block whose result was not the host's; what it gives is why
    blocks of this kind are the host's from then on: `left`, by title.
    """

    differs: Callable[[Any, str], dict[str, str]]
    left: dict[str, str] = field(default_factory=dict)
    compared: int = 0
    is_theirs: bool = False
    """Whether the host's own forward of a block is running: blocks within are the host's, too."""
    is_whole: bool = True
    """Whether the block that was computed last called no module of the host's, which would run
    twice.
    """
    _blocks: list[Any] = field(default_factory=list)
    _first: Any = None
    _due: dict[Any, int] = field(default_factory=dict)
    _next: dict[str, list[Any]] = field(default_factory=dict)
    _pending: list[_Pending] = field(default_factory=list)
    _turn: int = 0
    _repeats: bool = False
    _steps_left: int = 0

    def begin(self, blocks: Sequence[Any], turn: int | None = None, steps: int = STEPS) -> None:
        """Choose among `blocks` what to compare in the next so many steps, by `turn`: the same
        picture is made in the same way again. None: others than before, and ours is used, so that
        it makes no difference which.
        """
        self._repeats = turn is not None
        self._turn = self._turn + 1 if turn is None else turn
        self._blocks, self._steps_left = list(blocks), STEPS
        self._first = self._blocks[0] if self._blocks else None
        self._due, self._next = {}, {}
        for block in self._blocks:
            self._next.setdefault(block.kind.title, []).append(block)
        for number, (title, alike) in enumerate(self._next.items()):
            first = self._turn % len(alike)
            chosen, *self._next[title] = alike[first:] + alike[:first]
            self._due[chosen] = (self._turn + 3 * number) % max(steps, 1)

    def is_due(self, block: Any) -> bool:
        """Whether a call of `block`, just computed by us, is one to compare. Where that one cannot
        be, another of its kind is next.
        """
        if block is self._first:  # once in a step
            self._steps_left -= 1
            if not self._steps_left:
                self.begin(self._blocks)
        ahead = self._due.get(block)
        if ahead is None:
            return False
        self._due[block] = ahead - 1
        if ahead:
            return False
        del self._due[block]
        if not self.is_whole and self._next[block.kind.title]:
            self._due[self._next[block.kind.title].pop(0)] = 0
        return self.is_whole

    def compare(self, block: Any, ours: Any, x: torch.Tensor, forward: Callable[[], Any]) -> Any:
        """What the host's `forward` gives of x, with which `ours` is compared; or ours, where a
        generation has no turn, or the host has not the memory for its own.
        """
        self.is_theirs = True
        try:
            x = x.clone()  # ComfyUI's blocks of Flux add to it in place
            with without_search():
                theirs = forward()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return ours
        finally:
            self.is_theirs = False
        try:
            made, right = _tensors(ours), _tensors(theirs)
            for one, other in zip(made, right, strict=True):
                self._pending.append(_compared(block, one, other, x))
        except (RuntimeError, TypeError, ValueError, MemoryError) as error:
            if not is_out_of_memory(error):
                self.left.update(self.differs(block, "gave something else"))
            return theirs
        self.compared += 1
        if not self._repeats:
            return ours
        for one, other in zip(made, right, strict=True):
            if type(other) is not torch.Tensor or other.dtype != one.dtype:
                return theirs
            one.copy_(other)  # where the next block's graph reads it
        return ours

    def look(self, wait: bool = False) -> None:
        """Take notice of comparisons that have arrived; `wait`: of all."""
        while self._pending and self._pending[0].arrived(wait):
            done = self._pending.pop(0)
            apart, added, whole = done.norms.tolist()
            how = difference(apart, added, whole, done.epsilon)
            if how:
                self.left.update(self.differs(done.block, how))


def _compared(block: Any, ours: torch.Tensor, theirs: torch.Tensor, x: torch.Tensor) -> _Pending:
    """Begins a comparison. ours, theirs (N, ...), x like them where the block adds to it."""
    made, coarsest = norms(ours, theirs, x), epsilon(ours, theirs)
    if made.device.type != "cuda":
        return _Pending(block, made, coarsest, lambda _: True)
    with torch.cuda.device(made.device):  # pinned memory is the current card's, too
        here = torch.empty(3, dtype=made.dtype, pin_memory=True).copy_(made, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

    def arrived(wait: bool) -> bool:
        if is_recording(made.device):
            return False  # amid a graph of somebody's, nobody may ask
        if wait:
            event.synchronize()
        return bool(event.query())

    return _Pending(block, here, coarsest, arrived)


def _tensors(result: Any) -> list[torch.Tensor]:
    """The tensors in what a block gives. Of two streams, one that has ended is None."""
    parts = result if isinstance(result, tuple) else (getattr(result, "sample", result),)
    made = [part for part in parts if part is not None]
    if not made or not all(isinstance(part, torch.Tensor) for part in made):
        raise TypeError(f"a block gave {', '.join(type(part).__name__ for part in parts)}")
    return made
