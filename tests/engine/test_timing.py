"""How calls are timed, against a device whose clock is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib_rocm_sd.engine import measure
from lib_rocm_sd.engine.measure import Contender
from tests.ops.toy_op import Doubler, Doubling, Inputs, X
from tests.played import GPU, played

__all__ = ["played"]


def test_a_queued_call_takes_what_the_device_takes(played: Any) -> None:
    device = played(submit_us=30.0, work_us=4.0)
    assert measure.queued(device.call, 50, GPU, 30e-6) == pytest.approx([4.0] * 50)
    assert device.slept[-1] == pytest.approx(1.5 * 50 * 30 + 200)
    assert measure.timed(device.call, 5, GPU) == pytest.approx([34.0] + [30.0] * 4, abs=5)


def test_too_short_a_sleep_is_made_longer(played: Any) -> None:
    device = played(submit_us=30.0, work_us=4.0)
    assert measure.queued(device.call, 50, GPU, 1e-6) == pytest.approx([4.0] * 50)
    assert len([us for us in device.slept if us > 200]) >= 2


def test_long_calls_keep_the_device_busy_by_themselves(played: Any) -> None:
    device = played(submit_us=30.0, work_us=9000.0)
    assert measure.queued(device.call, 5, GPU, 30e-6) == pytest.approx([9000.0] * 5)
    assert device.host < 0.1e6


def test_a_torch_that_cannot_sleep_times_all_the_same(played: Any) -> None:
    device = played(submit_us=30.0, work_us=50.0, with_sleep=False)
    times = measure.queued(device.call, 5, GPU, 30e-6)
    assert times[1:] == pytest.approx([50.0] * 4)


def test_performance_measures_what_the_device_takes(
    played: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what the CPU takes to submit it: two launches may be faster than one."""
    device = played(submit_us=0.0, work_us=0.0)

    def taking(submit_us: float, work_us: float) -> Contender:
        def work(x: torch.Tensor) -> torch.Tensor:
            device.submit_us, device.work_us = submit_us, work_us
            device.call(0)
            return x

        return Contender(Doubler("one", work=work), None, None)

    monkeypatch.setattr(measure, "perf_counter", lambda: device.host / 1e6)
    problem, sets = Doubling(10, 8), [Inputs(X)]
    for submit_us, work_us in ((60.0, 4.0), (20.0, 5.0)):
        contender = taking(submit_us, work_us)
        took = measure._time_us(contender, problem, sets, GPU, 1.0)
        assert took == pytest.approx(work_us)
