"""GroupNorm + SiLU timed beside a plain copy: ours and its steps, torch's, in both memory formats.

Bytes are those that must be moved: an image is read once for its statistics, once to be
transformed, and written once; a copy reads and writes it. `of_copy` is the time over what these
bytes take at the copy's speed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.engine.measure import input_sets, timed
from lib_rocm_sd.engine.selftest import FAILURES, describe, relative_error
from lib_rocm_sd.ops.base import Launch, Run
from lib_rocm_sd.ops.group_norm import launch as launches
from lib_rocm_sd.ops.group_norm.op import GROUP_NORM_SILU
from lib_rocm_sd.ops.group_norm.problem import ODD, USUAL, GroupNormInputs, GroupNormProblem
from lib_rocm_sd.report import config_fields

WARM_UP = 3
Call = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class NormRow:
    """One way to run one problem. Times in µs; `error` is max |out - float64| / max |float64|.

    `reason` is set instead of figures where it did not run or was not right.
    """

    label: str
    problem: str
    way: str
    config: dict[str, Any] | None = None
    median_us: float = math.nan
    p10_us: float = math.nan
    p90_us: float = math.nan
    gigabytes_per_s: float = math.nan
    of_copy: float = math.nan
    error: float = math.nan
    reason: str = ""


def problems(small: bool, dtype: str) -> list[tuple[str, GroupNormProblem]]:
    """The usual problems, each in both memory formats, or the small odd ones."""
    if small:
        return [(f"odd {number}", problem) for number, problem in enumerate(ODD, 1)]
    return [
        (label, replace(problem, dtype=dtype, affine=dtype, channels_last=channels_last))
        for label, problem in USUAL
        for channels_last in (True, False)
    ]


def measure(
    label: str,
    problem: GroupNormProblem,
    device: torch.device,
    info: DeviceInfo,
    launch: Launch | None,
    runs: int,
) -> list[NormRow]:
    """A copy, every variant and config that is right, and the steps of our default config."""
    with torch.no_grad():
        sets = input_sets(GROUP_NORM_SILU, problem, device)
        size, start = problem.image_bytes, NormRow(label, str(problem), "copy")
        copied = torch.empty_like(sets[0][0])
        copy = _timed(start, sets, lambda x, *_: copied.copy_(x), 2 * size, runs)
        rows = [copy]
        exact = GROUP_NORM_SILU.reference(sets[0])
        for variant in GROUP_NORM_SILU.variants:
            row = replace(start, way=variant.name)
            refusals = variant.refusals(info.arch, problem)
            if not refusals and variant.ours and launch is None:
                refusals = list(info.reasons)
            if refusals:
                rows.append(replace(row, reason="; ".join(refusals)))
                continue
            for config in variant.configs(info.arch, problem):
                row = replace(row, config=config_fields(config))
                call = _bound(variant.run, launch if variant.ours else None, config, problem)
                rows.append(_verified(row, sets, call, exact, 3 * size, runs))
                if variant.ours and config == variant.configs(info.arch, problem)[0]:
                    rows += _steps(row, sets, launch, config, size, runs)
    bytes_per_us = 2 * size / copy.median_us
    return [_beside(row, bytes_per_us) for row in rows]


def _beside(row: NormRow, bytes_per_us: float) -> NormRow:
    return replace(row, of_copy=bytes_per_us / (row.gigabytes_per_s * 1e3))


def _bound(run: Run, launch: Launch | None, config: Any, problem: GroupNormProblem) -> Call:
    return lambda *inputs: run(launch, config, problem, GroupNormInputs(*inputs))


def _verified(
    row: NormRow,
    sets: Sequence[GroupNormInputs],
    call: Call,
    exact: torch.Tensor,
    moved_bytes: int,
    runs: int,
) -> NormRow:
    """`row` with figures, or the reason why not."""
    tolerance = GROUP_NORM_SILU.tolerance(GROUP_NORM_SILU.problem_of(sets[0]))
    try:
        error = relative_error(call(*sets[0]), exact)
        if not error <= tolerance:
            return replace(row, error=error, reason=f"wrong: error {error:.1e}")
        return replace(_timed(row, sets, call, moved_bytes, runs), error=error)
    except FAILURES as failure:
        return replace(row, reason=describe(failure))


def _timed(
    row: NormRow, sets: Sequence[GroupNormInputs], call: Call, moved_bytes: int, runs: int
) -> NormRow:
    device = sets[0][0].device

    def once(number: int) -> None:
        call(*sets[number % len(sets)])

    timed(once, WARM_UP, device)
    times = sorted(timed(once, runs, device))
    median_us = statistics.median(times)
    return replace(
        row,
        median_us=median_us,
        p10_us=times[len(times) // 10],
        p90_us=times[len(times) * 9 // 10],
        gigabytes_per_s=moved_bytes / median_us / 1e3,
    )


def _steps(
    row: NormRow,
    sets: Sequence[GroupNormInputs],
    launch: Launch | None,
    config: Any,
    size: int,
    runs: int,
) -> list[NormRow]:
    """Statistics, finalize and apply, each on its own."""
    if launch is None:
        return []
    x, gamma, beta, groups, eps, silu = sets[0]
    affine = (gamma, beta, groups, eps)
    parts = launches.launch_statistics(launch, config, x)
    norm = launches.launch_finalize(launch, config, parts, *affine)
    calls: tuple[tuple[str, Call, int], ...] = (
        ("  statistics", lambda x, *_: launches.launch_statistics(launch, config, x), size),
        (
            "  finalize",
            lambda *_: launches.launch_finalize(launch, config, parts, *affine),
            parts.numel() * 4,
        ),
        ("  apply", lambda x, *_: launches.launch_apply(launch, config, x, norm, silu), 2 * size),
    )
    return [_timed(replace(row, way=way), sets, call, moved, runs) for way, call, moved in calls]


def render(heading: str, rows: list[NormRow]) -> str:
    """The table that a person reads."""
    lines = [
        heading,
        f"{'problem':<52} {'way':<12} {'us':>9} {'p10..p90':>17} {'GB/s':>7} {'of copy':>7} "
        f"{'error':>8}",
    ]
    for row in rows:
        if row.reason:
            lines.append(f"{row.problem:<52} {row.way:<12} not run: {row.reason}")
            continue
        spread = f"{row.p10_us:.1f}..{row.p90_us:.1f}"
        error = "" if math.isnan(row.error) else f"{row.error:8.1e}"
        tiles = "" if row.config is None else ",".join(f"{k}={v}" for k, v in row.config.items())
        lines.append(
            f"{row.problem:<52} {row.way:<12} {row.median_us:>9.1f} {spread:>17} "
            f"{row.gigabytes_per_s:>7.0f} {row.of_copy:>7.2f} {error:>8} {tiles}".rstrip()
        )
    return "\n".join(lines)


def as_json(row: NormRow) -> dict[str, Any]:
    """The row as JSON has it: what was not measured is null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(row).items()
    }
