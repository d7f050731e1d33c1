"""One row: a way made ready, a step at a size never met, compared with float32, timed."""

from __future__ import annotations

import gc
import math
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from lib_rocm_sd.bench.unet.models import FACTOR, Case, Unet
from lib_rocm_sd.bench.unet.ways import Runner, Way
from lib_rocm_sd.bench.vae.measure import no_tf32
from lib_rocm_sd.bench.vae.measure import why as reason_of
from lib_rocm_sd.engine.memory import empty_cache, with_index
from lib_rocm_sd.engine.selftest import FAILURES, is_out_of_memory

FAILED = (*FAILURES, MemoryError)
STEPS = 10
"""Steps in one wall-clock timing: a sampler's steps follow one another without a wait."""
LONG_MS = 2000.0
"""A step longer than this is timed by itself, and few times."""


@dataclass(frozen=True)
class UnetRow:
    """One way to run one UNet at one size; what was not measured is NaN or empty.

    Times in ms. `wall_ms`: of a step, of `STEPS` in a row; `submit_ms`: until the call returns,
    which waits for nothing; `gpu_ms`, `launches`: what the device worked, and how many kernels and
    copies that were. `first_ms`, `second_ms`: the first two steps at a size never met before, with
    everything prepared at another one, and for Auto all tried that a host's start tries;
    `prepare_s`: the very first step. `peak_mib`: the most
    device memory during a step, over what was held before; `kept_mib`: what the way keeps, with all
    that graphs have reserved for what lies in between. `error`,
    `rms`: the largest difference and the root of the mean square of all, to the step in float32,
    over its largest value and its root mean square. `told`: what ran, and what was not ours.
    """

    case: str
    way: str
    runs: int = 0
    wall_ms: float = math.nan
    p10_ms: float = math.nan
    p90_ms: float = math.nan
    gpu_ms: float = math.nan
    submit_ms: float = math.nan
    launches: int = 0
    first_ms: float = math.nan
    second_ms: float = math.nan
    prepare_s: float = math.nan
    peak_mib: float = math.nan
    kept_mib: float = math.nan
    error: float = math.nan
    rms: float = math.nan
    told: tuple[str, ...] = ()
    reason: str = ""


def exact(unet: Unet, case: Case) -> torch.Tensor | None:
    """The step in float32, on the CPU; None where it does not fit."""
    args, kwargs = unet.arguments(case.width, case.height)
    latents, step, text, added = *args, kwargs.pop("added_cond_kwargs", None)
    if added is not None:
        kwargs["added_cond_kwargs"] = {**added, "text_embeds": added["text_embeds"].float()}
    kept = {name: p.data for name, p in unet.module.named_parameters()}
    try:
        with torch.no_grad(), no_tf32():
            unet.module.float()
            made: torch.Tensor = unet.module(latents.float(), step, text.float(), **kwargs)[0]
            return made.cpu()
    except FAILED as failure:
        if not is_out_of_memory(failure):
            raise
        return None
    finally:
        for name, parameter in unet.module.named_parameters():
            parameter.data = kept[name]
        clean(unet.device)


def measure(
    unet: Unet, case: Case, way: Way, runner: Runner, runs: int, right: torch.Tensor | None
) -> UnetRow:
    """The row of `way`, which is ready, for this case."""
    row = UnetRow(str(case), way.name)
    try:
        with torch.no_grad():
            return _figures(unet, case, way, runner, row, runs, right)
    except FAILED as failure:
        return replace(row, reason=reason_of(failure))
    finally:
        clean(unet.device)


def _figures(
    unet: Unet,
    case: Case,
    way: Way,
    runner: Runner,
    row: UnetRow,
    runs: int,
    right: torch.Tensor | None,
) -> UnetRow:
    args, kwargs = unet.arguments(case.width, case.height)
    device, before = unet.device, _allocated(unet.device)

    def step() -> Any:
        return runner.call(*args, **kwargs)[0]

    row = replace(row, prepare_s=wall_ms(step, device) / 1000)
    if not way.slow:
        other, more = unet.arguments(case.width, case.height + 8 * FACTOR)
        gc.collect()  # of the first step's garbage, which is not this one's
        fresh = [wall_ms(lambda: runner.call(*other, **more), device) for _ in range(2)]
        row = replace(row, first_ms=fresh[0], second_ms=fresh[1])
    clean(device)
    row = replace(row, kept_mib=(_allocated(device) + _pooled(device) - before) / 2**20)
    row = _compared(row, step().cpu(), right)
    row = replace(row, told=tuple(runner.told()))
    if row.reason:
        return row
    count = 1 if wall_ms(step, device) > LONG_MS else STEPS
    times = sorted(wall_ms(step, device, count) for _ in range(runs if count > 1 else 2))
    row = replace(row, submit_ms=_submit_ms(step, device, runs), peak_mib=_peak_mib(step, device))
    gpu_ms, launches = _device_work(step, device)
    return replace(
        row,
        runs=len(times),
        wall_ms=statistics.median(times),
        p10_ms=times[len(times) // 10],
        p90_ms=times[len(times) * 9 // 10],
        gpu_ms=gpu_ms,
        launches=launches,
    )


def _compared(row: UnetRow, output: torch.Tensor, right: torch.Tensor | None) -> UnetRow:
    if not bool(output.isfinite().all()):
        return replace(row, reason="wrong: the output has NaN or infinity")
    if right is None:
        return row
    gap = output.double() - right.double()
    largest = float(gap.abs().max()) / float(right.abs().max())
    rms = float(gap.square().mean().sqrt()) / float(right.double().square().mean().sqrt())
    return replace(row, error=largest, rms=rms)


def wall_ms(step: Any, device: torch.device, count: int = 1) -> float:
    """Wall-clock milliseconds per step over `count` steps, the device idle before and after."""
    _wait(device)
    begin = time.perf_counter()
    for _ in range(count):
        step()
    _wait(device)
    return (time.perf_counter() - begin) * 1000 / count


def _submit_ms(step: Any, device: torch.device, runs: int) -> float:
    if device.type != "cuda":
        return math.nan
    times = []
    for _ in range(runs):
        _wait(device)
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1000)
    _wait(device)
    return statistics.median(times)


def _peak_mib(step: Any, device: torch.device) -> float:
    if device.type != "cuda":
        return math.nan
    _wait(device)
    before = _allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    _wait(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def _device_work(step: Any, device: torch.device) -> tuple[float, int]:
    """What the device worked in one step, in ms, and its kernels and copies, by torch's profiler.

    What launches without torch is seen too: the profiler asks the driver.
    """
    if device.type != "cuda":
        return math.nan, 0
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        _wait(device)
    on_device = [e for e in profile.events() or () if e.device_type.name in ("CUDA", "PrivateUse1")]
    total_us = sum(event.time_range.elapsed_us() for event in on_device)
    return total_us / 1000, len(on_device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _pooled(device: torch.device) -> int:
    """Bytes that only graphs may use, and that no tensor takes now."""
    if device.type != "cuda":
        return 0
    segments = torch.cuda.memory_snapshot()
    here = [s for s in segments if s["device"] == with_index(device).index]
    own = [s for s in here if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)]
    return sum(s["total_size"] - s["allocated_size"] for s in own)


def clean(device: torch.device) -> None:
    """Give back what is not used any more."""
    gc.collect()
    _wait(device)
    empty_cache(device)
