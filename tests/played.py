"""A device whose clock is counted: what is submitted to it and when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from lib_rocm_sd.engine import measure

GPU = torch.device("cuda", 0)
RATE = 2e9
"""Cycles a second."""


class Device:
    """A queue in the order of submission, and two clocks in µs: `host` and `end` of the queue."""

    def __init__(self, submit_us: float, work_us: float, with_sleep: bool = True) -> None:
        self.submit_us, self.work_us = submit_us, work_us
        self.host = self.end = 0.0
        self.slept: list[float] = []
        if with_sleep:
            self._sleep = self.spin

    def busy(self, us: float) -> None:
        self.end = max(self.end, self.host) + us

    def call(self, number: int) -> None:
        self.host += self.submit_us
        self.busy(self.work_us)

    def spin(self, cycles: int) -> None:
        self.slept.append(cycles / RATE * 1e6)
        self.busy(self.slept[-1])

    def synchronize(self, device: Any = None) -> None:
        self.host = max(self.host, self.end)

    def device(self, device: Any) -> Any:
        return nullcontext()

    def current_device(self) -> int:
        return 0

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802 - as torch.cuda has it
        return Mark(self)


class Mark:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self) -> None:
        self.at = max(self.device.end, self.device.host)
        self.device.end = self.at

    def query(self) -> bool:
        return self.device.host >= self.at

    def elapsed_time(self, other: Mark) -> float:
        return (other.at - self.at) / 1000


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Device]]:
    """Makes it torch's device, and its host's clock the one that counts."""

    def play(*words: Any, **options: Any) -> Device:
        made = Device(*words, **options)
        monkeypatch.setattr(torch, "cuda", made)
        for module in (measure, time):
            monkeypatch.setattr(module, "perf_counter", lambda: made.host / 1e6)
        measure._cycles_per_s.cache_clear()
        return made

    yield play
    measure._cycles_per_s.cache_clear()
