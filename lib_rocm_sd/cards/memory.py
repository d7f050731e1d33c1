"""Memory that two processes share, tensors in it, and exchanges through it.

On Linux it is anonymous (memfd): no limit of /dev/shm holds, and it is gone with the processes,
however they end. On Windows it goes by a name, and is gone with them too.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any

import torch

ALIGNMENT = 256


class Shared:
    """`size` bytes. Raises OSError where they cannot be had.

    `name` is what the other process attaches it by.
    """

    def __init__(self, size: int, name: str = "") -> None:
        self.size = size
        self.is_pinned = False
        self._device: torch.device | None = None
        self._file = -1
        if sys.platform == "win32":
            self.name = name or f"rocm_sd_{os.getpid()}_{secrets.token_hex(8)}"
            self._map = mmap.mmap(-1, size, tagname=self.name)
        elif hasattr(os, "memfd_create"):
            self._map = self._mapped(name)
            self.name = name or f"/proc/{os.getpid()}/fd/{self._file}"
        else:
            raise OSError("this system has no shared memory that is known")
        self._bytes: torch.Tensor | None = torch.frombuffer(self._map, dtype=torch.uint8)

    def _mapped(self, name: str) -> mmap.mmap:
        if name:
            file = os.open(name, os.O_RDWR)
            try:
                return mmap.mmap(file, self.size)
            finally:
                os.close(file)
        self._file = os.memfd_create("rocm_sd", getattr(os, "MFD_CLOEXEC", 0))
        os.posix_fallocate(self._file, 0, self.size)  # else memory that is not there is a crash
        return mmap.mmap(self._file, self.size)

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of these bytes; ValueError where they do not lie within."""
        count = prod(shape) * dtype.itemsize
        if self._bytes is None or offset < 0 or offset % ALIGNMENT or offset + count > self.size:
            raise ValueError(f"{count} bytes at {offset} are not in {self.size} bytes")
        return self._bytes[offset : offset + count].view(dtype).view(*shape)

    def pin(self, device: torch.device) -> bool:
        """Let `device` reach it by itself, which makes copies faster; False where it cannot."""
        if self._bytes is not None and not self.is_pinned and torch.cuda.is_available():
            with suppress(Exception), torch.cuda.device(device):
                status: Any = torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
                    self._bytes.data_ptr(), self.size, 0
                )
                self.is_pinned, self._device = int(status) == 0, device
        return self.is_pinned

    def close(self) -> None:
        """Let go of it; the memory is freed when no tensor of it is left."""
        if self.is_pinned and self._bytes is not None:
            with suppress(Exception), torch.cuda.device(self._device):
                torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())  # type: ignore[no-untyped-call]
        self.is_pinned, self._bytes = False, None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def aligned(size: int) -> int:
    """The next offset at which a tensor may lie."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def settle(device: torch.device) -> None:
    """Wait for what was launched on this thread's stream, without looking again and again."""
    if device.type == "cuda":
        done = torch.cuda.Event(blocking=True)
        done.record(torch.cuda.current_stream(device))
        done.synchronize()


AREA_BYTES = 16 << 20
"""Bytes of one process in one exchange; larger data is exchanged in pieces."""


class Board:
    """The Ranks that are processes of one machine: each writes, all wait for all, each reads.
    `meet()` waits until all have written.

    Memory that was read in one exchange is written again in the one after the next. So who writes
    there knows by the exchange between that all others have read.
    """

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
            own
            if rank == self.rank
            else own.new_empty([*own.shape[:dim], size, *own.shape[dim + 1 :]])
            for rank, size in enumerate(sizes)
        ]
        flat = [part.view(-1) for part in parts]
        count = self._area // own.element_size()
        for first in range(0, max(len(part) for part in flat), count):
            pieces = {rank: part[first : first + count] for rank, part in enumerate(flat)}
            self._exchange({self.rank: pieces.pop(self.rank)}, pieces, 0)
        return torch.cat(parts, dim)

    def start_swap(
        self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]
    ) -> Board:
        """Send a tensor to each rank of `sent`, fill those of `received`. Raises ValueError where
        one is larger than `row_bytes`.
        """
        each = row_bytes(self._shared.size, self.size)
        if any(tensor.nbytes > each for tensor in (*sent.values(), *received.values())):
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


def board_bytes(size: int) -> int:
    """Bytes of shared memory for `size` processes."""
    return 2 * size * AREA_BYTES


def area_bytes(shared: int, size: int) -> int:
    """What one of `size` processes has of `shared` bytes in an exchange."""
    return shared // (2 * size) // ALIGNMENT * ALIGNMENT


def row_bytes(shared: int, size: int) -> int:
    """The most that one process can send to another in an exchange."""
    return area_bytes(shared, size) // size // ALIGNMENT * ALIGNMENT
