"""Images by rows of ranks: who has which, and how neighbours and all exchange what they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lib_rocm_sd.cards.group import Group, Waiting
from lib_rocm_sd.cards.shares import Part, split

LEAST_ROWS = 2
"""Fewest rows of the smallest image for each rank."""


@dataclass(frozen=True)
class RowSplit:
    """The rows of the largest image, `height` x `width`, by rank.

    Ranks begin at multiples of `factor`, by which the smallest image is smaller: so every image
    between is parted between the same places.
    """

    height: int
    width: int
    factor: int
    parts: tuple[Part, ...]

    def of(self, height: int) -> list[Part]:
        """The rows of the image of this height. Raises ValueError where the UNet has none such."""
        by, rows = 1, self.height
        while rows != height:
            by, rows = 2 * by, -(-rows // 2)
            if by > self.factor:
                raise ValueError(f"no image of the UNet has {height} rows: {self.height} at first")
        return self._smaller(by)

    @property
    def divides(self) -> bool:
        """Whether every image between the largest and the smallest is just half of the last."""
        return self.height % self.factor == 0 and self.width % self.factor == 0

    def tokens(self, rank: int, count: int) -> list[int]:
        """By rank, the pixels of the image of which `rank` has `count`. Raises ValueError, too."""
        by = 1
        while by <= self.factor:
            rows, width = self._smaller(by), -(-self.width // by)
            if (rows[rank][1] - rows[rank][0]) * width == count:
                return [(last - first) * width for first, last in rows]
            by *= 2
        raise ValueError(f"no image of the UNet has {count} pixels on rank {rank}")

    def _smaller(self, by: int) -> list[Part]:
        return [(-(-first // by), -(-last // by)) for first, last in self.parts]


def row_split(height: int, width: int, factor: int, weights: Sequence[float]) -> RowSplit:
    """Raises ValueError where a rank would have too few rows."""
    units = -(-height // factor)
    try:
        parts = split(units, weights, LEAST_ROWS)
    except ValueError:
        most = units // LEAST_ROWS
        raise ValueError(
            f"{height} rows are {units} of the smallest image: enough for {most} ranks of "
            f"{LEAST_ROWS} rows each, not for {len(weights)}"
        ) from None
    rows = tuple((first * factor, min(last * factor, height)) for first, last in parts)
    return RowSplit(height, width, factor, rows)


EXACT_STEPS = 2
Edges = tuple[torch.Tensor | None, torch.Tensor | None]


class Exact:
    """Each exchange is waited for. `key` names the place in the model that asks."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def parts(
        self, key: str, own: torch.Tensor, sizes: Sequence[int], dim: int
    ) -> list[torch.Tensor]:
        """All ranks' tensors, in order; rank r has `sizes[r]` along `dim`."""
        parts: list[torch.Tensor] = self.group.start_parts(own, sizes, dim).wait()
        return parts

    def edges(self, key: str, x: torch.Tensor, above: int, below: int) -> Edges:
        """The rows next to x (N, C, H, W): `above` from the rank before, `below` from the next.

        None at the image's top and bottom.
        """
        edges: Edges = self._start(x, above, below).wait()
        return edges

    def begin(self, time_step: float) -> None:
        """A step begins; time steps fall from one to the next of a picture."""

    def settle(self) -> None:
        """Nothing is under way after this."""

    def _start(self, x: torch.Tensor, above: int, below: int) -> Waiting:
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
        swap = group.start_swap(sent, received)

        def finish() -> Edges:
            swap.wait()
            return received.get(rank - 1), received.get(rank + 1)

        return Waiting(group, [], finish)


class Stale(Exact):
    """Not exact: takes from the other ranks what they had a step before, while this step's is on
    its way, so that no exchange is waited for (the idea of DistriFusion, arXiv:2402.19481).

    A picture's first EXACT_STEPS steps are exact. Then edges, keys and values and the statistics
    of GroupNorm are a step old but for a rank's own. Pictures differ from one card's, the more the
    fewer steps there are, and show seams where the ranks' rows meet if there are too few.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group)
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
        parts = self._before(key, self.group.start_parts(own, sizes, dim))
        return [own if rank == self.group.rank else part for rank, part in enumerate(parts)]

    def edges(self, key: str, x: torch.Tensor, above: int, below: int) -> Edges:
        edges: Edges = self._before(key, self._start(x, above, below))
        return edges

    def _before(self, key: str, now: Any) -> Any:
        before = self._under_way.get(key)
        self._under_way[key] = now
        if before is not None:
            earlier = before.wait()
        if before is None or self._step <= EXACT_STEPS:
            return now.wait()
        return earlier


def _rows(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.new_empty((x.shape[0], x.shape[1], count, x.shape[3]))
