"""How much device memory is free, and what tensors lie in."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

import torch

UNLIMITED_BYTES = 1 << 62
FREE_KNOWN_S = 0.05
"""How long plans are made with the same free memory: a new size of an image needs many at once."""

recording = threading.RLock()
"""Held while launches are recorded: to wait for a device would fail meanwhile, and spoil it."""


def synchronize(device: torch.device) -> None:
    """Wait for all that was launched on `device`, and for who records."""
    with recording:
        torch.cuda.synchronize(device)


def with_index(device: torch.device) -> torch.device:
    """`device` as tensors name it: cuda without an index is the current one."""
    index: int | None = device.index
    if device.type == "cuda" and index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def empty_cache(device: torch.device) -> None:
    """Give back what torch holds unused. `device` is current meanwhile: to free memory makes a
    context on the current one, which takes hundreds of MiB there.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def is_recording(device: torch.device) -> bool:
    """True during a graph capture: calls are recorded, so nothing can be tested or timed."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def sizes(tensor: torch.Tensor) -> tuple[int, int]:
    """Bytes of the memory that it lies in, and of its values; 0 and 0 where it has none (meta)."""
    if tensor.device.type == "meta":
        return 0, 0
    return tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()


storage_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
"""How many tensors, and others, share the storage at this address."""


def version_of(tensor: torch.Tensor) -> int | None:
    """How often it was changed; None where that is not counted: for an inference tensor, and for a
    parameter that was one before it was given other data (Forge moves weights so).
    """
    try:
        return None if tensor.is_inference() else tensor._version
    except RuntimeError:
        return None


def holders(tensor: torch.Tensor) -> int:
    """How many tensors share its memory, itself among them; 1 where this torch does not tell."""
    if storage_uses is None or tensor.device.type == "meta":
        return 1
    memory = tensor.untyped_storage()  # which counts, too
    return storage_uses(memory._cdata) - 1


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a tensor that lies so."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether its memory is more than its values take."""
    whole, values = sizes(tensor)
    return whole > values


def free_bytes(device: torch.device, headroom_bytes: int = 0) -> int:
    """Free device memory, with what torch's allocator holds unused, without the headroom.

    No limit is known for a CPU.
    """
    if device.type != "cuda" or is_recording(device):
        return UNLIMITED_BYTES
    used, reserved = _held_bytes(device)
    try:
        free = int(torch.cuda.mem_get_info(device)[0]) + reserved
    except RuntimeError:
        free = int(torch.cuda.get_device_properties(device).total_memory)
    return max(free - used - headroom_bytes, 0)


def _held_bytes(device: torch.device) -> tuple[int, int]:
    """What tensors take, and what torch's allocator holds, by one call and without sorting."""
    stats = torch.cuda.memory.memory_stats_as_nested_dict(device)
    if not stats:
        return 0, 0
    used, reserved = (
        stats[name]["all"]["current"] for name in ("allocated_bytes", "reserved_bytes")
    )
    return int(used), int(reserved)


class LatelyFree:
    """`free_bytes` as it was up to FREE_KNOWN_S ago."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[torch.device, tuple[float, int]] = {}

    def __call__(self, device: torch.device, headroom_bytes: int = 0) -> int:
        now = self._clock()
        until, free = self._known.get(device, (-math.inf, 0))
        if now >= until:
            free = free_bytes(device)
            if free != UNLIMITED_BYTES:  # else it is a CPU, or a capture, which will end
                self._known[device] = (now + FREE_KNOWN_S, free)
        return free if free == UNLIMITED_BYTES else max(free - headroom_bytes, 0)
