"""Where rows of an image wait: in device memory, in pinned host memory, or with the caller."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from lib_rocm_sd.vae.steps import Rows

HOST_BLOCK_BYTES = 64 << 20
"""Host memory is taken in pieces of at most this size: torch rounds pinned ones up to a power of 2,
and what has been read for the last time is given back piece by piece."""


class Source(Protocol):
    """Rows that can be read."""

    def read(self, rows: Rows) -> torch.Tensor:
        """(N, rows, W, C), contiguous, on the device. May be a view: not to be written to."""
        ...

    def release(self, below: int) -> None:
        """Rows before `below` will not be read again."""
        ...


class InputRows:
    """The caller's image (N, C, H, W), any strides, as channels-last rows padded to 16 channels."""

    def __init__(self, image: torch.Tensor, dtype: torch.dtype) -> None:
        self._image = image
        self._dtype = dtype

    def read(self, rows: Rows) -> torch.Tensor:
        part = self._image[:, :, rows[0] : rows[1]].permute(0, 2, 3, 1).to(self._dtype)
        return F.pad(part, (0, -part.shape[3] % 16)).contiguous()

    def release(self, below: int) -> None:
        return


class OutputRows:
    """The image (N, C, H, W) that the caller gets, filled row by row."""

    def __init__(self, image: torch.Tensor) -> None:
        self.image = image

    def write(self, first: int, rows: torch.Tensor) -> None:
        """Rows (N, n, W, C or more) from `first` on."""
        channels, count = self.image.shape[1], rows.shape[1]
        self.image[:, :, first : first + count] = rows[..., :channels].permute(0, 3, 1, 2)


class DeviceRows:
    """Rows in blocks on the device, written in order. Blocks are kept as they come."""

    def __init__(self) -> None:
        self._blocks: list[tuple[Rows, torch.Tensor]] = []

    def write(self, first: int, rows: torch.Tensor) -> None:
        """Rows (N, n, W, C) from `first` on; a view of more is copied, the rest is not kept."""
        if rows.untyped_storage().nbytes() > rows.numel() * rows.element_size():
            rows = rows.clone()
        self._blocks.append(((first, first + rows.shape[1]), rows))

    def read(self, rows: Rows) -> torch.Tensor:
        parts = [
            block[:, max(rows[0] - first, 0) : rows[1] - first]
            for (first, last), block in self._blocks
            if first < rows[1] and last > rows[0]
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def release(self, below: int) -> None:
        self._blocks = [(rows, block) for rows, block in self._blocks if rows[1] > below]


class HostRows:
    """Rows in host memory, pinned where the device can copy from there by itself."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: list[tuple[Rows, torch.Tensor]] = []

    def write(self, first: int, rows: torch.Tensor) -> None:
        """Rows (N, n, W, C) from `first` on."""
        per_row = rows.shape[0] * rows[0, 0].numel() * rows.element_size()
        step = max(HOST_BLOCK_BYTES // max(per_row, 1), 1)
        for start in range(0, rows.shape[1], step):
            part = rows[:, start : start + step]
            block = torch.empty(
                part.shape, dtype=part.dtype, pin_memory=self._device.type == "cuda"
            )
            block.copy_(part, non_blocking=True)
            self._blocks.append(((first + start, first + start + part.shape[1]), block))

    def read(self, rows: Rows) -> torch.Tensor:
        shape = (self._blocks[0][1].shape[0], rows[1] - rows[0], *self._blocks[0][1].shape[2:])
        made = torch.empty(shape, dtype=self._blocks[0][1].dtype, device=self._device)
        for (first, last), block in self._blocks:
            low, high = max(first, rows[0]), min(last, rows[1])
            if low < high:
                part = block[:, low - first : high - first]
                made[:, low - rows[0] : high - rows[0]].copy_(part, non_blocking=True)
        return made

    def release(self, below: int) -> None:
        self._blocks = [(rows, block) for rows, block in self._blocks if rows[1] > below]
