"""Exchanges between processes of one machine that make a picture together, through memory that
they share: each writes, all wait for all, each reads.

Memory that was read in one exchange is written again in the one after the next. So who writes there
knows by the exchange between that all others have read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from lib_rocm_sd.several.memory import ALIGNMENT, Shared, settle

AREA_BYTES = 16 << 20
"""Bytes of one process in one exchange; larger data is exchanged in pieces."""


class Board:
    """The `Ranks` of vae/shared.py that are processes. `meet()` waits until all have written."""

    def __init__(
        self,
        shared: Shared,
        rank: int,
        size: int,
        device: torch.device,
        meet: Callable[[], None],
    ) -> None:
        self.rank, self.size = rank, size
        self.busy_ms = 0.0
        """What this process took between exchanges."""
        self._shared, self._device, self._meet = shared, device, meet
        self._area = area_bytes(shared.size, size)
        self._exchanges = 0
        self._since = time.perf_counter()

    def concatenate(self, own: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        """All ranks' tensors along `dim`, where rank r has `sizes[r]` of it."""
        own = own.contiguous()
        parts = [
            own if rank == self.rank else own.new_empty(_shape(own, dim, size))
            for rank, size in enumerate(sizes)
        ]
        flat = [part.view(-1) for part in parts]
        count = self._area // own.element_size()
        for first in range(0, max(len(part) for part in flat), count):
            self._exchange(
                {self.rank: flat[self.rank][first : first + count]},
                {rank: flat[rank][first : first + count] for rank in self._others()},
                0,
            )
        return torch.cat(parts, dim)

    def start_swap(
        self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]
    ) -> Board:
        """Send a tensor to each rank of `sent`, fill those of `received`. Raises ValueError where
        one is larger than `row_bytes`.
        """
        each = row_bytes(self._shared.size, self.size)
        if any(_bytes(tensor) > each for tensor in (*sent.values(), *received.values())):
            raise ValueError(f"more than {each} bytes are exchanged at once")
        self._exchange(sent, received, each)
        return self

    def wait(self) -> None:
        """A swap is done when it has begun."""

    def _exchange(
        self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor], each: int
    ) -> None:
        """What is for rank r lies `r * each` bytes after the begin of the sender's area."""
        for rank, tensor in sent.items():
            place = self._place(self.rank, rank * each, tensor)
            place.copy_(tensor, non_blocking=True)
        settle(self._device)
        self.busy_ms += 1000 * (time.perf_counter() - self._since)
        self._meet()
        self._since = time.perf_counter()
        for rank, tensor in received.items():
            tensor.copy_(self._place(rank, self.rank * each, tensor), non_blocking=True)
        self._exchanges += 1

    def _place(self, rank: int, offset: int, like: torch.Tensor) -> torch.Tensor:
        area = self._exchanges % 2 * self.size + rank
        return self._shared.tensor(area * self._area + offset, like.shape, like.dtype)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]


def board_bytes(size: int) -> int:
    """Bytes of shared memory for `size` processes."""
    return 2 * size * AREA_BYTES


def area_bytes(shared: int, size: int) -> int:
    """What one of `size` processes has of `shared` bytes in an exchange."""
    return shared // (2 * size) // ALIGNMENT * ALIGNMENT


def row_bytes(shared: int, size: int) -> int:
    """The most that one process can send to another in an exchange."""
    return area_bytes(shared, size) // size // ALIGNMENT * ALIGNMENT


def _shape(like: torch.Tensor, dim: int, size: int) -> list[int]:
    return [size if place == dim else length for place, length in enumerate(like.shape)]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
