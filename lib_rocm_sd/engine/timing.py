"""Times of calls: each waited for, or with the device's work queued."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from time import perf_counter

import torch

from lib_rocm_sd.engine.memory import synchronize

MOST_BUSY_S = 0.1
CYCLES = 1 << 20

NumberedCall = Callable[[int], object]
"""Given the number of the run."""


def timed(call: NumberedCall, runs: int, device: torch.device) -> list[float]:
    """Times in µs of `runs` calls, each given its number: device events, or the clock on a CPU."""
    return (_timed_on_gpu if device.type == "cuda" else _timed_on_cpu)(call, runs, device)


def _timed_on_gpu(call: NumberedCall, runs: int, device: torch.device) -> list[float]:
    with torch.cuda.device(device):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
        synchronize(device)
        marks[0].record()
        for number in range(runs):
            call(number)
            marks[number + 1].record()
        synchronize(device)
    pairs = zip(marks, marks[1:], strict=False)
    return [1000.0 * begin.elapsed_time(end) for begin, end in pairs]


def _timed_on_cpu(call: NumberedCall, runs: int, device: torch.device) -> list[float]:
    times = []
    for number in range(runs):
        begin = perf_counter()
        call(number)
        times.append(1e6 * (perf_counter() - begin))
    return times


def queued(call: NumberedCall, runs: int, device: torch.device, submit_s: float) -> list[float]:
    """Times in µs of `runs` calls on the device, which is kept busy until all are submitted: what
    the CPU does between two launches does not count. `submit_s`: what a call is expected to take
    until it returns.
    """
    if device.type != "cuda":
        return timed(call, runs, device)
    with torch.cuda.device(device):
        for _ in range(3):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
            synchronize(device)
            begin = perf_counter()
            keep_busy(min(1.5 * submit_s * runs + 2e-4, MOST_BUSY_S))
            marks[0].record()
            for number in range(runs):
                call(number)
                marks[number + 1].record()
            late = marks[0].query()
            needed_s = (perf_counter() - begin) / runs
            synchronize(device)
            if not late or needed_s * runs > MOST_BUSY_S:
                break
            submit_s = max(submit_s, needed_s)
    pairs = zip(marks, marks[1:], strict=False)
    return [1000.0 * first.elapsed_time(second) for first, second in pairs]


def keep_busy(seconds: float) -> None:
    """Let the current device spin, so that what is submitted meanwhile stands in its queue."""
    sleep = getattr(torch.cuda, "_sleep", None)
    rate = _cycles_per_s(torch.cuda.current_device())
    if sleep is not None and math.isfinite(rate):
        sleep(int(seconds * rate))


@cache
def _cycles_per_s(index: int) -> float:
    """How fast a device, the current one, counts; infinite where it cannot be kept busy."""
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
