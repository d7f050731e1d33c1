"""What is asked between the calls of a speed test: limits, and who waits for what."""

from __future__ import annotations

import threading

import pytest
import torch

from lib_rocm_sd.lab import speed_job
from tests.clock import Clock
from tests.waiting import WAIT_S


def test_a_limit_ends_a_row_but_keeps_its_times(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed_job, "monotonic", clock)
    times = speed_job.Guard(lambda: False, 2.0).times_us(
        lambda _: clock.turn(0.5), torch.device("cpu"), 100.0, 1000
    )
    assert times == pytest.approx([500_000] * 5)  # the fifth ends after the limit
    late = speed_job.Guard(lambda: False, 0.0)
    clock.turn(0.1)
    with pytest.raises(speed_job.TooLongError, match="not finished within"):
        late.check()


def test_nobody_waits_for_what_cannot_be_stopped() -> None:
    begun, leave = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        leave.wait(WAIT_S)

    with pytest.raises(speed_job.Cancelled):
        speed_job.Guard(begun.is_set).beside(work)
    (beside,) = (each for each in threading.enumerate() if each.name == speed_job.BESIDE)
    assert beside.is_alive()
    leave.set()
    beside.join(WAIT_S)
    with pytest.raises(ZeroDivisionError):
        speed_job.Guard(lambda: False).beside(lambda: 1 // 0)
