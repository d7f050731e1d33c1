"""Where rows of an image wait: in device memory, in pinned host memory, or with the caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from lib_rocm_sd.engine.memory import is_shared
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
    """The image (N, C, H, W) that the caller gets, made when its first rows are there."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make
        self._image: torch.Tensor | None = None

    @property
    def image(self) -> torch.Tensor:
        if self._image is None:
            self._image = self._make()
        return self._image

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
        if is_shared(rows):
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


class _Lane:
    """Copies that run beside the device's work, in order; on a CPU they are done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._stream = torch.cuda.Stream(device) if self._device is not None else None

    def copy(
        self, pairs: list[tuple[torch.Tensor, torch.Tensor]], after: list[torch.cuda.Event]
    ) -> torch.cuda.Event | None:
        """Copy each (to, from) after the work so far and `after`; the event that this is done."""
        if self._stream is None:
            for to, origin in pairs:
                to.copy_(origin)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for event in after:
            self._stream.wait_event(event)
        # Else torch makes the device that is current a context, where it has none, when it returns.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for to, origin in pairs:
                to.copy_(origin, non_blocking=True)
            return self._stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let the work from now on begin when `event` has come."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


@dataclass(frozen=True)
class _Block:
    """Rows in host memory, there when `written` has come."""

    rows: Rows
    values: torch.Tensor
    written: torch.cuda.Event | None


class HostRows:
    """Rows in host memory, pinned where the device can copy from there by itself.

    Copies run beside the device's work: those that `prefetch` announced, and written ones. The
    tensors that they read or fill are kept until the device is told to wait for them, so their
    memory is never in use twice; at most one written tensor is kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in, self._out = _Lane(device), _Lane(device)
        self._blocks: list[_Block] = []
        self._ahead: dict[Rows, tuple[torch.Tensor, torch.cuda.Event | None]] = {}
        self._leaving: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def write(self, first: int, rows: torch.Tensor) -> None:
        """Rows (N, n, W, C) from `first` on."""
        per_row = rows.shape[0] * rows[0, 0].numel() * rows.element_size()
        step = max(HOST_BLOCK_BYTES // max(per_row, 1), 1)
        self._landed()
        pairs, spans = [], []
        for start in range(0, rows.shape[1], step):
            part = rows[:, start : start + step]
            pinned = self._device.type == "cuda"
            pairs.append((torch.empty(part.shape, dtype=part.dtype, pin_memory=pinned), part))
            spans.append((first + start, first + start + part.shape[1]))
        event = self._out.copy(pairs, [])
        self._leaving = (rows, event)
        self._blocks += [
            _Block(span, to, event) for span, (to, _) in zip(spans, pairs, strict=True)
        ]

    def prefetch(self, rows: Rows) -> None:
        """Begin to copy what `read` will be asked for next."""
        if rows in self._ahead:
            return
        some = self._blocks[0].values
        shape = (some.shape[0], rows[1] - rows[0], *some.shape[2:])
        tensor = torch.empty(shape, dtype=some.dtype, device=self._device)
        pairs, after = [], []
        for block in self._blocks:
            low, high = max(block.rows[0], rows[0]), min(block.rows[1], rows[1])
            if low < high:
                origin = block.values[:, low - block.rows[0] : high - block.rows[0]]
                pairs.append((tensor[:, low - rows[0] : high - rows[0]], origin))
                after += [] if block.written is None else [block.written]
        self._ahead[rows] = (tensor, self._in.copy(pairs, after))

    def read(self, rows: Rows) -> torch.Tensor:
        self.prefetch(rows)
        tensor, event = self._ahead.pop(rows)
        self._in.wait(event)
        return tensor

    def release(self, below: int) -> None:
        self._blocks = [block for block in self._blocks if block.rows[1] > below]

    def settle(self) -> None:
        """Let the device wait for what is being copied, and forget what was announced."""
        self._landed()
        for _, event in self._ahead.values():
            self._in.wait(event)
        self._ahead = {}

    def _landed(self) -> None:
        if self._leaving is not None:
            self._out.wait(self._leaving[1])
            self._leaving = None
