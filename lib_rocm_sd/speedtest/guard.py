"""Between any two calls of a test: was it cancelled, does it take too long?"""

from __future__ import annotations

import gc
import math
import statistics
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, TypeVar

import torch

from lib_rocm_sd.engine.measure import timed
from lib_rocm_sd.engine.memory import empty_cache
from lib_rocm_sd.engine.selftest import FAILURES, describe, is_out_of_memory
from lib_rocm_sd.errors import NotSupportedError
from lib_rocm_sd.speedtest.side import Cancelled

FAILED = (*FAILURES, MemoryError, LookupError, ArithmeticError, AssertionError, ImportError)
"""What a method, or a host, may die of: the reason of a row, not the end of the test."""
CHUNK_S = 0.25
"""About how long calls are timed without asking whether to go on."""
LONG_S = 0.7
"""A call that takes longer is waited for from beside, so that Cancel need not wait for it."""
POLL_S = 0.05
BESIDE = "rocm_sd speed test, kernels"

T = TypeVar("T")


class TooLongError(RuntimeError):
    """A call did not end within its limit."""


class Guard:
    """Asked between calls. `limit_s`: how long a row may take altogether.

    `long`: calls may take long, so it is worth to be asked within them.
    """

    def __init__(self, cancelled: Callable[[], bool], limit_s: float = math.inf) -> None:
        self.cancelled = cancelled
        self.limit_s = limit_s
        self.long = False
        self.end = monotonic() + limit_s

    def check(self) -> None:
        """Raises Cancelled, TooLongError."""
        if self.cancelled():
            raise Cancelled("cancelled")
        if monotonic() > self.end:
            raise TooLongError(f"not finished within {self.limit_s:.0f} s")

    def stop(self) -> bool:
        """Whether `check` would raise."""
        return self.cancelled() or monotonic() > self.end

    def beside(self, work: Callable[[], T], limited: bool = False) -> T:
        """The result of `work`, which cannot be stopped: once cancelled, nobody waits for it.

        What it compiles and tests is kept by the engine all the same. `limited`: nor is it waited
        for beyond the row's limit.
        """
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                with torch.no_grad():
                    results.append(work())
            except FAILED as error:
                errors.append(error)

        thread = threading.Thread(target=run, name=BESIDE, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL_S)
            if limited or self.cancelled():
                self.check()
        if errors:
            raise errors[0]
        if not results:
            raise RuntimeError("kernels could not be made ready")
        return results[0]

    def timed(
        self, call: Callable[[int], None], runs: int, device: torch.device, expected_s: float
    ) -> list[float]:
        """Times in µs of `runs` calls that take about `expected_s` each."""
        if expected_s < LONG_S:
            return timed(call, runs, device)
        return self.beside(lambda: timed(call, runs, device), limited=True)

    def times_us(
        self,
        call: Callable[[int], None],
        device: torch.device,
        share_s: float,
        most: int,
        least: int = 3,
        expected_s: float = 0.0,
    ) -> list[float]:
        """Sorted times of as many calls as `share_s` has room for, `least` to `most`.

        Fewer where the row's limit ends them. The call has been run before: the first is like the
        others.
        """
        times: list[float] = []
        begin, runs = monotonic(), 1
        while len(times) < most:
            if not times or self.cancelled():
                self.check()
            count = min(runs, most - len(times))
            times += self.timed(call, count, device, times[-1] / 1e6 if times else expected_s)
            past_s = monotonic() - begin
            if (len(times) >= least and past_s >= share_s) or monotonic() > self.end:
                break
            each_s = max(past_s / len(times), 1e-7)
            runs = max(1, int(min(CHUNK_S, share_s - past_s) / each_s))
        return sorted(times)


def spread(times_us: list[float]) -> dict[str, Any]:
    """Median, 10th and 90th percentile in ms, and the number of runs, of sorted times."""
    count = len(times_us)
    return {
        "median": statistics.median(times_us) / 1000,
        "p10": times_us[count // 10] / 1000,
        "p90": times_us[count * 9 // 10] / 1000,
        "runs": count,
    }


def why(failure: BaseException, at: str) -> str:
    """The reason of a row that was not measured, in one line. `at`: where memory was short."""
    if is_out_of_memory(failure):
        return f"out of memory at {at}"
    if isinstance(failure, NotSupportedError):
        refusals = (f"{name}: {'; '.join(said)}" for name, said in failure.refusals.items())
        return ", ".join(refusals)
    if isinstance(failure, (TooLongError, ValueError)):
        return str(failure).strip().splitlines()[0] if str(failure).strip() else describe(failure)
    return describe(failure)


def clean(device: torch.device) -> None:
    """Give back what is not used any more."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        empty_cache(device)


class Peak:
    """The most device memory from its making on, over what was held then, in MiB."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before = 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)

    def mib(self) -> float:
        """NaN where the device cannot tell."""
        if self.device.type != "cuda":
            return math.nan
        torch.cuda.synchronize(self.device)
        return (torch.cuda.max_memory_allocated(self.device) - self.before) / 2**20
