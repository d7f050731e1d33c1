"""How calls are timed, what memory they take, and why there are no figures."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from lib_rocm_sd.engine.measure import NumberedCall, keep_busy, queued, timed
from lib_rocm_sd.engine.memory import empty_cache
from lib_rocm_sd.engine.selftest import FAILURES, describe, is_out_of_memory
from lib_rocm_sd.errors import NotSupportedError
from lib_rocm_sd.lab.rows import Row

FAILED = (*FAILURES, MemoryError)
"""What a way may die of: the reason of its row."""
WARM_UP = 3
UNKNOWN_CACHE_BYTES = 256 << 20
"""Where torch does not tell; also for AMD, which has a last cache that torch does not know of."""
MOST_SETS = 256
WARM_S = 0.02
BATCH = 20
"""Calls that are timed together where a queue is kept full."""
Timer = Callable[[NumberedCall, int, torch.device], list[float]]


def timed_on_a_queue(call: NumberedCall, runs: int, device: torch.device) -> list[float]:
    """Times in µs of each call, the next one being in the GPU's queue. On a CPU as
    engine.measure.timed.
    """
    submit_s = warm_up(call, device) if device.type == "cuda" else 0.0
    return queued(call, runs, device, submit_s)


def timed_with_a_full_queue(call: NumberedCall, runs: int, device: torch.device) -> list[float]:
    """Times in µs of a call, from `runs` batches, the queue of the GPU being full: what the CPU
    does between two launches does not count. On a CPU as engine.measure.timed.
    """
    if device.type != "cuda":
        return timed(call, runs, device)
    times: list[float] = []
    with torch.cuda.device(device):
        for run in range(runs):
            torch.cuda.synchronize(device)
            begin = time.perf_counter()
            for number in range(BATCH):
                call(run * BATCH + number)
            took_s = time.perf_counter() - begin
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            keep_busy(2 * took_s)
            first.record()
            for number in range(BATCH):
                call(run * BATCH + number)
            last.record()
            torch.cuda.synchronize(device)
            times.append(1000.0 * first.elapsed_time(last) / BATCH)
    return times


def cache_bytes(device: torch.device) -> int:
    """The largest cache of a device."""
    if device.type != "cuda":
        return 32 << 20
    size = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    return max(size, UNKNOWN_CACHE_BYTES) if torch.version.hip or not size else int(size)


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
        if len(times) % 20 == 0:
            wait(device)
    wait(device)
    return sorted(times)[len(times) // 2]


def wait(device: torch.device) -> None:
    """Until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_ms(step: Callable[[], Any], device: torch.device, count: int = 1) -> float:
    """Wall-clock milliseconds per step over `count` steps, the device idle before and after."""
    wait(device)
    begin = time.perf_counter()
    for _ in range(count):
        step()
    wait(device)
    return (time.perf_counter() - begin) * 1000 / count


def allocated(device: torch.device) -> int:
    """Bytes that tensors take now."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


class Peak:
    """The most device memory from its making on, over what was held then, in MiB."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before = 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)

    def bytes(self) -> int | None:
        """None where the device cannot tell."""
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - self.before

    def mib(self) -> float:
        """NaN where the device cannot tell."""
        peak = self.bytes()
        return math.nan if peak is None else peak / 2**20


def clean(device: torch.device) -> None:
    """Give back what is not used any more."""
    gc.collect()
    wait(device)
    empty_cache(device)


def tried(row: Row, device: torch.device, measure: Callable[[Row], Row]) -> Row:
    """What `measure` makes of a row, or the row with the reason why not."""
    try:
        with torch.no_grad():
            return measure(row)
    except FAILED as failure:
        return replace(row, reason=why(failure))
    finally:
        clean(device)


@contextmanager
def no_tf32() -> Iterator[None]:
    """Within this, float32 is computed as such."""
    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = convolutions.allow_tf32, products.allow_tf32
    try:
        convolutions.allow_tf32 = products.allow_tf32 = False
        yield
    finally:
        convolutions.allow_tf32, products.allow_tf32 = before


def why(failure: BaseException, short: str = "") -> str:
    """The reason of a row that was not measured, in one line.

    `short`: what is said where memory was short; else the error itself.
    """
    if isinstance(failure, NotSupportedError):
        refusals = (f"{name}: {'; '.join(said)}" for name, said in failure.refusals.items())
        return ", ".join(refusals)
    if not is_out_of_memory(failure):
        return describe(failure)
    return short or f"out of memory: {describe(failure)}"
