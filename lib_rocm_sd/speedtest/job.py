"""What the parts of a test share: whom they ask, what they tell, how much time they have."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lib_rocm_sd.speedtest.guard import Guard, clean
from lib_rocm_sd.speedtest.presets import Effort, effort
from lib_rocm_sd.speedtest.request import Request
from lib_rocm_sd.speedtest.result import SpeedRow
from lib_rocm_sd.speedtest.side import HostSide, Picture


@dataclass(frozen=True)
class Shot:
    """A pair of pictures in memory. `difference`: amplified, an image like the others."""

    case: str
    off: Picture
    on: Picture
    difference: Any
    largest: int
    mean: float


@dataclass
class Job:
    """One test. `told(fraction, text)`: progress. `shots`: pictures made so far."""

    request: Request
    side: HostSide
    cancelled: Callable[[], bool]
    told: Callable[[float, str], None]
    shots: list[Shot] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.side.device

    @property
    def effort(self) -> Effort:
        return effort(self.request, self.side.device)

    def guard(self) -> Guard:
        """For one row."""
        return Guard(self.cancelled, self.effort.limit_s)

    def patient(self) -> Guard:
        """A guard for calls that may take long."""
        guard = self.guard()
        guard.long = True
        return guard

    def clean(self) -> None:
        """After a row. A cancelled test does not wait for the device: its end cleans up."""
        if not self.cancelled():
            clean(self.device)


class Shares:
    """Deals a part's time out to its rows: what one leaves, the next ones have."""

    def __init__(self, part_s: float, rows: int) -> None:
        self.end = time.monotonic() + part_s
        self.left = rows
        self.rows = rows

    def next_s(self) -> float:
        """The next row's share."""
        share_s = max(0.0, self.end - time.monotonic()) / max(self.left, 1)
        self.left -= 1
        return share_s

    @property
    def fraction(self) -> float:
        """Fraction of the rows that were begun."""
        return min(1.0, (self.rows - self.left) / max(self.rows, 1))


Part = Callable[[Job], Iterator[SpeedRow]]
