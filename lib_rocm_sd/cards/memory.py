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

from lib_rocm_sd.cards.ranks import RankError

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
        self.slots: dict[Any, tuple[Any, list[torch.Tensor]]] = {}
        """What boards have found in it."""

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
        self.slots.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def aligned(size: int) -> int:
    """The next offset at which a tensor may lie."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def settle(device: torch.device) -> None:
    """Wait for what was launched on this thread's stream, without looking again and again."""
    if device.type == "cuda":
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        event.synchronize()


AREA_BYTES = 16 << 20
"""Bytes of one process in one exchange; larger data is exchanged in pieces."""
SPIN_S, PAUSE_S, LOOK_S = 0.02, 0.0002, 0.005
"""How long a process looks for the others' flags again and again, how long it sleeps between two
looks from then on, and how often it asks whether the others are still there.
"""
MOST_EXCHANGES = 1 << 20
"""A board makes fewer."""
MOST_RANKS = 16
_FLAG_BYTES = MOST_RANKS * ALIGNMENT
"""The memory begins with them: how many exchanges each rank has written for, in a cache line of its
own. They lie there however many ranks a board has.
"""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_TENSORS, _MOST_DIMS = 2, 5
_HEADER = MOST_TENSORS * (2 + _MOST_DIMS)
_HEADER_BYTES = ALIGNMENT


class Board:
    """The Ranks that are processes of one machine: each writes, all wait for all, each reads.

    `turn`: greater than that of every board before it in this memory. While this one waits for the
    others, `look(waited_s)` is called now and then: it raises RankError where one has failed.
    ValueError for more than MOST_RANKS.

    Memory that was read in one exchange is written again in the one after the next. So who writes
    there knows by the exchange between that all others have read.
    """

    def __init__(
        self,
        shared: Shared,
        rank: int,
        size: int,
        device: torch.device,
        turn: int,
        look: Callable[[float], None],
    ) -> None:
        if size > MOST_RANKS:
            raise ValueError(f"{size} ranks are more than {MOST_RANKS}")
        self.rank, self.size = rank, size
        self.busy_ms = 0.0
        """What this process took between exchanges."""
        self._shared, self._device, self._look = shared, device, look
        self._others = [other for other in range(size) if other != rank]
        self._area = area_bytes(shared.size, size)
        flags = shared.tensor(0, (MOST_RANKS, ALIGNMENT // 8), torch.int64)
        self._flags: Any = flags.numpy()[:size, 0]
        self._exchanges = turn * MOST_EXCHANGES
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
            pieces = [part[first : first + count] for part in flat]
            self._place(self.rank, 0, pieces[self.rank]).copy_(pieces[self.rank], non_blocking=True)
            self._meet()
            for rank in self._others:
                pieces[rank].copy_(self._place(rank, 0, pieces[rank]), non_blocking=True)
            self._exchanges += 1
        return torch.cat(parts, dim)

    def exchange(self, sent: Mapping[int, Sequence[torch.Tensor]]) -> dict[int, list[torch.Tensor]]:
        """See Ranks. ValueError where more than `row_bytes` are for one rank."""
        for rank, tensors in sent.items():
            description = described(tensors)
            header, places = self._slot(self.rank, rank, description)
            header[:] = description
            for place, tensor in zip(places, tensors, strict=True):
                place.copy_(tensor, non_blocking=True)
        self._meet()
        received = {}
        for rank in self._others:
            header, _ = self._slot(rank, self.rank, ())
            description = tuple(header.tolist())
            received[rank] = blank(description, self._device)
            _, places = self._slot(rank, self.rank, description)
            for place, tensor in zip(places, received[rank], strict=True):
                tensor.copy_(place, non_blocking=True)
        self._exchanges += 1
        return received

    def _slot(
        self, sender: int, receiver: int, description: tuple[int, ...]
    ) -> tuple[Any, list[torch.Tensor]]:
        """Where the sender describes what it sends to the receiver, and where such tensors lie;
        looked up, since nothing is launched meanwhile.
        """
        key = (self.size, self._exchanges % 2, sender, receiver, description)
        if key not in self._shared.slots:
            most = row_bytes(self._shared.size, self.size)
            begin = receiver * (most + _HEADER_BYTES)
            header = self._place(sender, begin, torch.empty(_HEADER, dtype=torch.int64)).numpy()
            places, end = [], begin + _HEADER_BYTES
            for like in blank(description, torch.device("meta")):
                places.append(self._place(sender, end, like))
                end += aligned(like.nbytes)
            if end - begin > most + _HEADER_BYTES:
                raise ValueError(f"more than {most} bytes are exchanged at once")
            self._shared.slots[key] = header, places
        return self._shared.slots[key]

    def _place(self, rank: int, offset: int, like: torch.Tensor) -> torch.Tensor:
        area = self._exchanges % 2 * self.size + rank
        place = _FLAG_BYTES + area * self._area + offset
        return self._shared.tensor(place, like.shape, like.dtype)

    def _meet(self) -> None:
        """Wait until all have written."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        begin = looked_s = time.perf_counter()
        self.busy_ms += 1000 * (begin - self._since)
        self._flags[self.rank] = self._exchanges + 1
        newer = (self._exchanges // MOST_EXCHANGES + 1) * MOST_EXCHANGES
        if any(self._flags[other] >= newer for other in self._others):
            raise RankError("the others are at another picture")
        while any(self._flags[other] <= self._exchanges for other in self._others):
            now_s = time.perf_counter()
            if now_s - looked_s > LOOK_S:
                self._look(now_s - begin)
                looked_s = now_s
            time.sleep(0 if now_s - begin < SPIN_S else PAUSE_S)
        self._since = time.perf_counter()


def described(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """As many numbers for any tensors, of which `blank` makes such tensors."""
    numbers: list[int] = []
    for tensor in tensors:
        shape = [*tensor.shape, *[0] * (_MOST_DIMS - tensor.ndim)]
        numbers += [1 + _DTYPES.index(tensor.dtype), tensor.ndim, *shape]
    return *numbers, *[0] * (_HEADER - len(numbers))


def blank(description: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Tensors without values, as they were `described`."""
    tensors = []
    for first in range(0, len(description), 2 + _MOST_DIMS):
        dtype, dims = description[first : first + 2]
        if dtype:
            shape = description[first + 2 : first + 2 + dims]
            tensors.append(torch.empty(shape, dtype=_DTYPES[dtype - 1], device=device))
    return tensors


def board_bytes(size: int) -> int:
    """Bytes of shared memory for `size` processes."""
    return _FLAG_BYTES + 2 * size * AREA_BYTES


def area_bytes(shared: int, size: int) -> int:
    """What one of `size` processes has of `shared` bytes in an exchange."""
    return (shared - _FLAG_BYTES) // (2 * size) // ALIGNMENT * ALIGNMENT


def row_bytes(shared: int, size: int) -> int:
    """The most that one process can send to another in an exchange."""
    return (area_bytes(shared, size) // size - _HEADER_BYTES) // ALIGNMENT * ALIGNMENT
