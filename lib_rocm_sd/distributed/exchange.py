"""What the rows of an image need of other ranks: now, or as it was a step ago."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lib_rocm_sd.distributed.group import Group, Waiting

Edges = tuple[torch.Tensor | None, torch.Tensor | None]


class Exact:
    """Each exchange is waited for. `key` names the place in the model that asks."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def parts(
        self, key: str, own: torch.Tensor, sizes: Sequence[int], dim: int
    ) -> list[torch.Tensor]:
        """All ranks' tensors, in order; rank r has `sizes[r]` along `dim`."""
        made: list[torch.Tensor] = self.group.start_parts(own, sizes, dim).wait()
        return made

    def edges(self, key: str, x: torch.Tensor, above: int, below: int) -> Edges:
        """The rows next to x (N, C, H, W): `above` from the rank before, `below` from the next.

        None at the image's top and bottom.
        """
        made: Edges = self._start(x, above, below).wait()
        return made

    def begin(self, time_step: float) -> None:
        """A step begins; time steps fall from one to the next of a picture."""

    def settle(self) -> None:
        """Nothing is under way after this."""

    def _start(self, x: torch.Tensor, above: int, below: int) -> _EdgesWaiting:
        group, rank = self.group, self.group.rank
        before, after = rank > 0, rank + 1 < group.size
        sent, received = {}, {}
        if before and below:
            sent[rank - 1] = x[:, :, :below]
        if after and above:
            sent[rank + 1] = x[:, :, x.shape[2] - above :]
        if before and above:
            received[rank - 1] = _rows(x, above)
        if after and below:
            received[rank + 1] = _rows(x, below)
        return _EdgesWaiting(group.start_swap(sent, received), rank, received)


class _EdgesWaiting:
    def __init__(self, swap: Waiting, rank: int, received: dict[int, torch.Tensor]) -> None:
        self._swap, self._rank, self._received = swap, rank, received

    def wait(self) -> Edges:
        self._swap.wait()
        return self._received.get(self._rank - 1), self._received.get(self._rank + 1)


class Stale(Exact):
    """Not exact: takes from the other ranks what they had a step before, while this step's is on
    its way, so that no exchange is waited for (the idea of DistriFusion, arXiv:2402.19481).

    A picture's first `exact_steps` steps are exact. Then edges, keys and values and the statistics
    of GroupNorm are a step old but for a rank's own. Pictures differ from one card's, the more the
    fewer steps there are, and show seams where the ranks' rows meet if there are too few.
    """

    def __init__(self, group: Group, exact_steps: int = 2) -> None:
        super().__init__(group)
        self._exact_steps = exact_steps
        self._under_way: dict[str, Any] = {}
        self._step, self._time = 0, -1.0

    def begin(self, time_step: float) -> None:
        if time_step >= self._time:  # a new picture
            self.settle()
            self._step = 0
        self._step, self._time = self._step + 1, time_step

    def settle(self) -> None:
        for waiting in self._under_way.values():
            waiting.wait()
        self._under_way = {}
        self._time = -1.0

    def parts(
        self, key: str, own: torch.Tensor, sizes: Sequence[int], dim: int
    ) -> list[torch.Tensor]:
        found = self._before(key, self.group.start_parts(own, sizes, dim))
        return [own if rank == self.group.rank else part for rank, part in enumerate(found)]

    def edges(self, key: str, x: torch.Tensor, above: int, below: int) -> Edges:
        made: Edges = self._before(key, self._start(x, above, below))
        return made

    def _before(self, key: str, now: Any) -> Any:
        before = self._under_way.get(key)
        self._under_way[key] = now
        if before is not None:
            kept = before.wait()
        if before is None or self._step <= self._exact_steps:
            return now.wait()
        return kept


def _rows(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.new_empty((x.shape[0], x.shape[1], count, x.shape[3]))
