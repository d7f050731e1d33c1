"""One step of the host's UNet: without this extension and with its blocks ours, compared, timed.

Compared with the host's own step in the same precision: one in float32 would take twice the UNet's
memory. So the error is that of both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from lib_rocm_sd.lab.timing import wall_ms
from lib_rocm_sd.speedtest.guard import FAILED, Guard, Peak, why
from lib_rocm_sd.speedtest.job import Job, Shares
from lib_rocm_sd.speedtest.presets import sizes
from lib_rocm_sd.speedtest.result import OURS, SpeedRow
from lib_rocm_sd.speedtest.side import Cancelled, Denoiser

OFF = "extension off"
IN_A_ROW, CHUNK_MS = 10, 250.0
"""A sampler's steps follow one another without a wait: as many are timed together, in such time."""
LEAST_TIMES = 3
MOST_ERROR = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
"""A larger one, relative to the largest value, is not by rounding alone."""
Step = Callable[[], Any]


def rows(job: Job) -> Iterator[SpeedRow]:
    """Per size, both: ms a step. Raises Cancelled."""
    wanted = sizes(job.request, job.device)
    shares = Shares(job.effort.parts_s["step"], 2 * len(wanted))
    try:
        unet = job.side.unet()
    except Cancelled:
        raise
    except FAILED as failure:
        unet, reason = None, why(failure, "loading")
    else:
        reason = "" if unet else "there is no UNet to run"
    for size in wanted:
        if unet is None:
            yield SpeedRow("step", _case(size), OURS["step"], reason=reason)
            continue
        outputs: list[torch.Tensor] = []
        for method, inside in ((OFF, unet.theirs), (OURS["step"], unet.ours)):
            job.told(shares.fraction, f"{_case(size)}, {method}")
            try:
                with inside():
                    row = _row(job, unet, size, method, outputs, shares.next_s())
            except Cancelled:
                raise
            except FAILED as failure:
                row = SpeedRow("step", _case(size), method, reason=why(failure, f"{size}x{size}"))
            finally:
                job.clean()
            yield row


def _case(size: int) -> str:
    return f"a step, {size}x{size}, batch 2"


def _row(
    job: Job, unet: Denoiser, size: int, method: str, outputs: list[torch.Tensor], share_s: float
) -> SpeedRow:
    """The row of a method; its result is added to `outputs`, whose first is compared with."""
    args, kwargs = unet.arguments(size)
    guard = job.guard()

    def step() -> Any:
        return unet.call(*args, **kwargs)

    guard.check()
    made = guard.beside(step)
    made = (made if isinstance(made, torch.Tensor) else made[0]).cpu().double()
    row = replace(SpeedRow("step", _case(size), method), note=unet.note)
    outputs.append(made)
    error = float((made - outputs[0]).abs().max() / outputs[0].abs().max())
    if not error <= MOST_ERROR.get(unet.dtype, 0.0):
        return replace(row, reason=f"wrong: error {error:.1e}")
    times = _times(step, guard, job, share_s)
    peak = Peak(job.device)
    step()
    return replace(
        row,
        median=statistics.median(times),
        p10=times[len(times) // 10],
        p90=times[len(times) * 9 // 10],
        runs=len(times),
        peak_mib=peak.mib(),
        error=error,
    )


def _times(step: Step, guard: Guard, job: Job, share_s: float) -> list[float]:
    """Sorted, in ms of wall time."""
    wall_ms(step, job.device)
    each_ms = max(wall_ms(step, job.device), 1e-3)
    count = max(1, min(IN_A_ROW, int(CHUNK_MS / each_ms)))
    most = min(job.effort.runs, int(1000 * share_s / (each_ms * count)))
    times: list[float] = []
    while len(times) < max(most, LEAST_TIMES):
        guard.check()
        times.append(wall_ms(step, job.device, count))
    return sorted(times)
