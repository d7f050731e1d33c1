"""Memory that two processes share, and tensors in it.

On Linux it is anonymous (memfd): no limit of /dev/shm holds, and it is gone with the processes,
however they end. On Windows it goes by a name, and is gone with them too.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from collections.abc import Sequence
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
                made: Any = torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
                    self._bytes.data_ptr(), self.size, 0
                )
                self.is_pinned, self._device = int(made) == 0, device
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


def room(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes in shared memory."""
    return aligned(tensor.numel() * tensor.element_size())


def aligned(size: int) -> int:
    """The next offset at which a tensor may lie."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def settle(device: torch.device) -> None:
    """Wait for what was launched on this thread's stream, without looking again and again."""
    if device.type == "cuda":
        done = torch.cuda.Event(blocking=True)
        done.record(torch.cuda.current_stream(device))
        done.synchronize()
