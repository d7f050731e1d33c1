"""One row: a way made ready, run at one size, compared with float32, timed."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch

from lib_rocm_sd.bench.vae.coders import FACTOR, Coder
from lib_rocm_sd.bench.vae.result import VaeRow
from lib_rocm_sd.bench.vae.ways import Runner, Way
from lib_rocm_sd.engine.memory import empty_cache
from lib_rocm_sd.engine.selftest import FAILURES, describe, is_out_of_memory
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.engine.timing import timed
from lib_rocm_sd.errors import NotSupportedError
from lib_rocm_sd.report import report
from lib_rocm_sd.vae.program import Program

FAILED = (*FAILURES, MemoryError)
TIMED_MS = 4000.0
"""About how long the timed runs of a row may take together; there is at least one."""
LONG_MS = 15000.0
"""A run longer than this is not timed again, nor compared with our whole frame; above
REFERENCE_MOST the first such run is the row's only one."""
FRESH_MOST = 1024
"""Up to this size the first run is timed at a resolution of its own, beyond at the row's own."""
PREPARED = (320, 256)
"""Height and width of what is run before anything is timed."""
REFERENCE_MOST = 2048
"""Up to this size everything is compared with float32."""
LIMIT = 4.0
"""The most that values of a slice are compared at once, in millions."""


@dataclass(frozen=True)
class Reference:
    """A run in float32, on the CPU, and what computed it. `image` is None where nothing could."""

    image: torch.Tensor | None
    source: str


FRUGAL = Session.of("Memory")


def exact(coder: Coder, size: int) -> Reference:
    """The result in float32: torch's, where that does not fit our program's in bands."""
    if size > REFERENCE_MOST:
        return Reference(None, "")
    image = coder.random_input(size, size).float()
    try:
        with torch.no_grad(), no_tf32():
            wide = coder.module.to(torch.float32)
            try:
                return Reference(wide(image).cpu(), "torch float32")
            except FAILED as failure:
                if not is_out_of_memory(failure):
                    raise
            clean(coder.device)
            return Reference(Program(wide)(image, session=FRUGAL).cpu(), "rocm_sd float32 in bands")
    except FAILED as failure:
        return Reference(None, f"none: {why(failure)}")
    finally:
        coder.module.to(coder.dtype)
        clean(coder.device)


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


def clean(device: torch.device) -> None:
    """Give back what is not used any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    empty_cache(device)


def prepare(coder: Coder, way: Way, runner: Runner) -> float:
    """Compile what a resolution that is never timed needs; MiB that the way keeps after it.

    What fails here is the rows' to tell. A way that is compiled anew for each size is left alone.
    """
    if way.compiled:
        return math.nan
    height, width = (side // 4 for side in PREPARED) if coder.small else PREPARED
    before = _allocated(coder.device)
    with torch.no_grad(), suppress(*FAILED):
        runner.call(coder.random_input(height, width))
    clean(coder.device)
    return (_allocated(coder.device) - before) / 2**20 if coder.device.type == "cuda" else math.nan


def measure(
    coder: Coder, way: Way, runner: Runner, size: int, fresh: int, runs: int, reference: Reference
) -> VaeRow:
    """The row of `way` at `size` x `size`. `fresh`: rows by which its first run's image is lower.

    So each way meets a resolution that nothing before it has met. `runs` are fewer where one takes
    long.
    """
    row = VaeRow(coder.role, size, way.name)
    try:
        with torch.no_grad():
            own = size > FRESH_MOST or way.compiled
            return _figures(coder, way, runner, row, 0 if own else fresh, runs, reference)
    except FAILED as failure:
        return replace(row, reason=why(failure))
    finally:
        clean(coder.device)


def why(failure: BaseException) -> str:
    """The reason of a row that was not measured."""
    if isinstance(failure, NotSupportedError):
        refusals = (f"{name}: {'; '.join(said)}" for name, said in failure.refusals.items())
        return ", ".join(refusals)
    kind = "out of memory: " if is_out_of_memory(failure) else ""
    return f"{kind}{describe(failure)}"


@dataclass(frozen=True)
class _Ran:
    output: torch.Tensor
    time_ms: float
    peak_mib: float


def _figures(
    coder: Coder, way: Way, runner: Runner, row: VaeRow, fresh: int, runs: int, reference: Reference
) -> VaeRow:
    size, height = row.size, max(row.size - fresh, FACTOR)
    image, other = (coder.random_input(rows, size) for rows in (size, height))
    ran = _run(runner, other)
    row = replace(row, first_at=f"{height}x{size}", first_ms=ran.time_ms)
    if ran.time_ms < LONG_MS or size <= REFERENCE_MOST:
        del ran
        ran = _run(runner, other)
        ratio = row.first_ms / ran.time_ms
        row = replace(row, second_ms=ran.time_ms, first_ratio=ratio)
    if fresh:
        runner.call(image)
        del ran
        ran = _run(runner, image)
    used = report.summary() if way.level else ""
    row = replace(row, plan=runner.plan(), ran=used, peak_mib=ran.peak_mib)
    row = _compared(row, ran.output, reference)
    if row.reason:
        return row
    count = min(runs, int(TIMED_MS / ran.time_ms)) if ran.time_ms < LONG_MS else 0
    times = timed(lambda _: _discard(runner.call(image)), count, coder.device) if count else []
    row = _with_times(row, sorted([time_us / 1000 for time_us in times] or [ran.time_ms]), way)
    return _against_whole(row, runner, image, ran.output)


def _run(runner: Runner, image: torch.Tensor) -> _Ran:
    """One run; the peak is over what was held before."""
    device, outputs = image.device, list[torch.Tensor]()
    before = _allocated(device)
    report.begin()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    time_us = timed(lambda _: outputs.append(runner.call(image)), 1, device)[0]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else math.nan
    return _Ran(outputs[0], time_us / 1000, (peak - before) / 2**20)


def _with_times(row: VaeRow, times: list[float], way: Way) -> VaeRow:
    median_ms = statistics.median(times)
    row = replace(
        row,
        runs=len(times),
        median_ms=median_ms,
        p10_ms=times[len(times) // 10],
        p90_ms=times[len(times) * 9 // 10],
        ms_per_megapixel=median_ms / (row.size**2 / 1e6),
    )
    if way.compiled:
        row = replace(row, compile_s=max(row.first_ms - row.second_ms, 0) / 1000)
    return row


def _discard(output: torch.Tensor) -> None:
    del output


def _compared(row: VaeRow, output: torch.Tensor, reference: Reference) -> VaeRow:
    """`row` with how far `output` is from the reference, or why it counts for nothing."""
    if not math.isfinite(float(output.sum(dtype=torch.float32))):
        return replace(row, reason="wrong: the output has NaN or infinity")
    if reference.image is None:
        return replace(row, reference=reference.source)
    if output.shape != reference.image.shape:
        shapes = f"{tuple(output.shape)}, expected {tuple(reference.image.shape)}"
        return replace(row, reason=f"wrong: the output is {shapes}")
    right = reference.image.to(output.device)
    gap = output.float() - right
    top = float(right.abs().max())
    error, shift = float(gap.abs().max()) / top, float(gap.mean((0, 2, 3)).abs().max()) / top
    return replace(row, error=error, shift=shift, reference=reference.source)


def _against_whole(
    row: VaeRow, runner: Runner, image: torch.Tensor, output: torch.Tensor
) -> VaeRow:
    """`row` with the difference to our whole frame at the same level, where there were bands."""
    whole = runner.whole()
    if whole is None:
        return row
    if row.median_ms >= LONG_MS:
        return replace(row, note="not compared with the whole frame, which takes long")
    try:
        most, share = steps(output, whole(image))
    except FAILED as failure:
        return replace(row, note=f"no whole frame to compare with: {why(failure)}")
    return replace(row, steps=most, steps_share=share)


def steps(output: torch.Tensor, whole: torch.Tensor) -> tuple[float, float]:
    """The largest difference after quantisation to 8 bits, and the share of values that differ.

    0..255 is the range -m..m, where m is the largest absolute value of `whole`.
    """
    top, most, count = float(whole.abs().max()), 0.0, 0
    each = max(int(LIMIT * 1e6) // max(whole[0, 0, 0].numel(), 1), 1)
    for x, y in zip(output.split(each, 2), whole.split(each, 2), strict=True):
        gap = (_quantised(x, top) - _quantised(y, top)).abs()
        most, count = max(most, float(gap.max())), count + int((gap > 0).sum())
    return most, count / whole.numel()


def _quantised(values: torch.Tensor, top: float) -> torch.Tensor:
    return ((values.float() / top + 1) * 127.5).round_().clamp_(0, 255)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
