"""Times of calls on a device that has its work queued, and of calls that it has to wait for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache

import torch

from lib_rocm_sd.engine.measure import timed

UNKNOWN_CACHE_BYTES = 256 << 20
"""Where torch does not tell; also for AMD, which has a last cache that torch does not know of."""
MOST_SETS = 256
MOST_BUSY_S = 0.1
WARM_S = 0.02
CYCLES = 1 << 20

Call = Callable[[int], object]
"""Given the number of the run."""


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


def warm_up(call: Call, device: torch.device) -> float:
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


def queued(call: Call, runs: int, device: torch.device, submit_s: float) -> list[float]:
    """Times in µs of `runs` calls on the device, which is kept busy until all are submitted."""
    if device.type != "cuda":
        return timed(_forget(call), runs, device)
    with torch.cuda.device(device):
        for _ in range(3):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
            torch.cuda.synchronize(device)
            begin = time.perf_counter()
            _keep_busy(device, min(1.5 * submit_s * runs + 2e-4, MOST_BUSY_S))
            marks[0].record()
            for number in range(runs):
                call(number)
                marks[number + 1].record()
            late = marks[0].query()
            needed_s = (time.perf_counter() - begin) / runs
            torch.cuda.synchronize(device)
            if not late or needed_s * runs > MOST_BUSY_S:
                break
            submit_s = max(submit_s, needed_s)
    pairs = zip(marks, marks[1:], strict=False)
    return [1000.0 * first.elapsed_time(second) for first, second in pairs]


def waited_for(call: Call, runs: int, device: torch.device) -> list[float]:
    """Times in µs of `runs` calls between device events, nothing queued before the first."""
    return timed(_forget(call), runs, device)


def _forget(call: Call) -> Callable[[int], None]:
    def run(number: int) -> None:
        call(number)

    return run


def _keep_busy(device: torch.device, seconds: float) -> None:
    """Let the device spin, so that what is submitted meanwhile stands in its queue."""
    sleep = getattr(torch.cuda, "_sleep", None)
    rate = _cycles_per_s(device.index or 0)
    if sleep is not None and math.isfinite(rate):
        sleep(int(seconds * rate))


@cache
def _cycles_per_s(index: int) -> float:
    """How fast the device counts; infinite where it cannot be kept busy."""
    sleep = getattr(torch.cuda, "_sleep", None)
    if sleep is None:
        return math.inf
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for _ in range(2):
        torch.cuda.synchronize(index)
        marks[0].record()
        sleep(CYCLES)
        marks[1].record()
        torch.cuda.synchronize(index)
    return 1000.0 * CYCLES / max(marks[0].elapsed_time(marks[1]), 1e-3)
