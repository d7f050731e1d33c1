"""Linear layers of Stable Diffusion 1.5 and XL timed: ours by every config, and torch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lib_rocm_sd.bench.rows import TimedRow, figured, refusals_of, spread, tiles
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.engine.measure import input_sets
from lib_rocm_sd.engine.selftest import relative_error
from lib_rocm_sd.ops import base
from lib_rocm_sd.ops.base import Launch
from lib_rocm_sd.ops.linear.inputs import LinearInputs
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.problem import ODD, USUAL, LinearProblem
from lib_rocm_sd.report import config_fields

OPERATIONS_BESIDE = 1e10
"""What a layer takes beside its products, as operations: for the estimate of the time left."""
Call = Callable[[LinearInputs], torch.Tensor]


@dataclass(frozen=True)
class LinearRow(TimedRow):
    """One way to run one linear layer."""

    tflops: float = math.nan


def problems(small: bool, dtype: str) -> list[tuple[str, LinearProblem]]:
    """The layers, or the small odd problems."""
    if small:
        return [(f"odd {number}", problem) for number, problem in enumerate(ODD, 1)]
    return [(label, replace(problem, dtype=dtype)) for label, problem in USUAL]


def operations(problem: LinearProblem) -> int:
    """Floating-point operations of the layer's products, two for each."""
    return 2 * problem.rows * problem.k * problem.weight_rows


def work(problem: LinearProblem) -> float:
    """About what measuring it takes depends on."""
    return OPERATIONS_BESIDE + operations(problem)


def measure(
    label: str,
    problem: LinearProblem,
    device: torch.device,
    info: DeviceInfo,
    launch: Launch | None,
    runs: int,
) -> list[LinearRow]:
    """Every variant and config that is right; ours in the order in which it would be tried."""
    rows: list[LinearRow] = []
    with torch.no_grad():
        sets = input_sets(LINEAR, problem, device)
        exact = LINEAR.reference(sets[0])
        kept = None if sets[0].residual is None else sets[0].residual.clone()
        for variant in LINEAR.every:
            row = LinearRow(label, str(problem), variant.name)
            refusals = refusals_of(variant, problem, info, launch)
            if refusals:
                rows.append(replace(row, reason="; ".join(refusals)))
                continue
            mine = launch if variant.ours else None
            for config in variant.configs(info.arch, problem):
                call = partial(_called, variant.run, mine, config, problem)
                row = replace(row, config=config_fields(config))
                rows.append(_verified(row, problem, sets, kept, call, exact, runs))
    return rows


def _called(
    run: base.Run, launch: Launch | None, config: Any, problem: LinearProblem, i: LinearInputs
) -> torch.Tensor:
    made: torch.Tensor = run(base.Call(problem, i, launch, config))
    return made


def _verified(
    row: LinearRow,
    problem: LinearProblem,
    sets: Sequence[LinearInputs],
    kept: torch.Tensor | None,
    call: Call,
    exact: torch.Tensor,
    runs: int,
) -> LinearRow:
    """`row` with figures, or the reason why not. `kept`: a residual before it was written over."""
    residual = None if kept is None else kept.clone()
    fresh = sets[0]._replace(residual=residual, out=residual if problem.in_place else None)
    return figured(
        row,
        lambda: relative_error(call(fresh), exact),
        LINEAR.tolerance(problem),
        lambda: _timed(row, problem, sets, call, runs),
    )


def _timed(
    row: LinearRow, problem: LinearProblem, sets: Sequence[LinearInputs], call: Call, runs: int
) -> LinearRow:
    device = sets[0].x.device

    def once(number: int) -> None:
        call(sets[number % len(sets)])

    row = replace(row, **spread(once, runs, device))  # type: ignore[arg-type]
    return replace(row, tflops=operations(problem) / row.median_us / 1e6)


def render(heading: str, rows: list[LinearRow]) -> str:
    """The table that a person reads."""
    lines = [
        heading,
        f"{'layer':<40} {'problem':<60} {'way':<15} {'us':>9} {'p10..p90':>17} {'TFLOP/s':>8} "
        f"{'error':>8}",
    ]
    for row in rows:
        start = f"{row.label:<40} {row.problem:<60} {row.way:<15}"
        if row.reason:
            lines.append(f"{start} not run: {row.reason}")
            continue
        spread = f"{row.p10_us:.1f}..{row.p90_us:.1f}"
        lines.append(
            f"{start} {row.median_us:>9.1f} {spread:>17} {row.tflops:>8.1f} {row.error:8.1e} "
            f"{tiles(row)}".rstrip()
        )
    return "\n".join(lines)
