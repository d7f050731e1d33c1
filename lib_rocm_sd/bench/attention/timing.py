"""How often attention is called to be timed, on how many copies of its inputs."""

from __future__ import annotations

import time

import torch

from lib_rocm_sd.engine.timing import NumberedCall

UNKNOWN_CACHE_BYTES = 256 << 20
"""Where torch does not tell; also for AMD, which has a last cache that torch does not know of."""
MOST_SETS = 256
WARM_S = 0.02


def cache_bytes(device: torch.device) -> int:
    """The largest cache of a device."""
    if device.type != "cuda":
        return 32 << 20
    known = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    return max(known, UNKNOWN_CACHE_BYTES) if torch.version.hip or not known else int(known)


def sets_needed(input_bytes: int, device: torch.device) -> int:
    """Copies of the inputs to rotate through, so that none is still in the cache when it returns:
    together they are twice its size, and more.
    """
    return min(2 + 2 * cache_bytes(device) // max(input_bytes, 1), MOST_SETS)


def warm_up(call: NumberedCall, device: torch.device) -> float:
    """Call for a while; the time in seconds from a call to its return, the device's work queued."""
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - begin < WARM_S and len(times) < 1000):
        before = time.perf_counter()
        call(len(times))
        times.append(time.perf_counter() - before)
        if device.type == "cuda" and len(times) % 20 == 0:
            torch.cuda.synchronize(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return sorted(times)[len(times) // 2]
