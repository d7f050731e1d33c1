"""Attention timed: every variant and config that is right on this machine, in one run."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lib_rocm_sd.bench.methods import ALLOWANCE, METHODS
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.ops.attention import ATTENTION, AttentionProblem, SlicedAttention
from lib_rocm_sd.ops.base import Launch, Variant
from lib_rocm_sd.report import config_fields
from lib_rocm_sd.selftest import FAILURES, describe
from lib_rocm_sd.tune import input_sets, timed

WARM_UP = 3


@dataclass(frozen=True)
class Row:
    """One variant on one problem. Times in µs; `error` is max |out - float64| / max |float64|.

    `extra_bytes` is the most device memory held during a call beyond inputs and output; None where
    the device cannot tell. `reason` is set instead of figures where the variant did not run or was
    not right.
    """

    label: str
    problem: dict[str, Any]
    variant: str
    config: dict[str, Any] | None
    median_us: float = math.nan
    p10_us: float = math.nan
    p90_us: float = math.nan
    tflops: float = math.nan
    error: float = math.nan
    extra_bytes: int | None = None
    reason: str = ""


def exact(inputs: tuple[Any, ...]) -> torch.Tensor:
    """The result in float64, computed in slices so that a large problem fits."""
    q, k, v, mask, scale = inputs
    return SlicedAttention().run(None, None, q.double(), k.double(), v.double(), mask, scale)


def measure(
    label: str,
    problem: AttentionProblem,
    device: torch.device,
    info: DeviceInfo,
    launch: Launch | None,
    runs: int,
) -> list[Row]:
    """One row per variant (and per config of ours), each verified against float64 before timing."""
    rows = []
    with torch.no_grad():
        sets = input_sets(ATTENTION, problem, device)
        reference = exact(sets[0])
        for variant in (*ATTENTION.variants, *METHODS):
            empty = Row(label, asdict(problem), variant.name, None)
            refusals = variant.refusals(info.arch, problem)
            if not refusals and variant.ours and launch is None:
                refusals = list(info.reasons)
            if refusals:
                rows.append(Row(**{**asdict(empty), "reason": "; ".join(refusals)}))
                continue
            for config in variant.configs(info.arch, problem):
                row = Row(**{**asdict(empty), "config": config_fields(config)})
                figures = _figures(
                    variant, config, launch if variant.ours else None, sets, reference, runs
                )
                if "median_us" in figures:
                    figures["tflops"] = problem.flops / figures["median_us"] / 1e6
                rows.append(Row(**{**asdict(row), **figures}))
    return rows


def _figures(
    variant: Variant[AttentionProblem],
    config: Any,
    launch: Launch | None,
    sets: list[tuple[Any, ...]],
    reference: torch.Tensor,
    runs: int,
) -> dict[str, Any]:
    device = reference.device

    def call(number: int) -> None:
        variant.run(launch, config, *sets[number % len(sets)])

    try:
        out, extra_bytes = _first_call(variant, config, launch, sets[0])
        error = ((out.double() - reference).abs().max() / reference.abs().max()).item()
        problem = ATTENTION.problem_of(*sets[0])
        allowance = ALLOWANCE if variant in METHODS else 1.0
        if not error <= allowance * ATTENTION.tolerance(problem):
            return {"error": error, "reason": f"wrong: error {error:.1e}"}
        timed(call, WARM_UP, device)
        times = timed(call, runs, device)
    except FAILURES as failure:
        return {"reason": describe(failure)}
    times.sort()
    return {
        "median_us": statistics.median(times),
        "p10_us": times[len(times) // 10],
        "p90_us": times[len(times) * 9 // 10],
        "error": error,
        "extra_bytes": extra_bytes,
    }


def _first_call(
    variant: Variant[AttentionProblem],
    config: Any,
    launch: Launch | None,
    inputs: tuple[Any, ...],
) -> tuple[torch.Tensor, int | None]:
    """The output, and the device memory that was held at most beyond inputs and output."""
    device = inputs[0].device
    variant.run(launch, config, *inputs)  # compile, load, allocate workspaces of libraries
    if device.type != "cuda":
        return variant.run(launch, config, *inputs), None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    out = variant.run(launch, config, *inputs)
    torch.cuda.synchronize(device)
    held = torch.cuda.max_memory_allocated(device) - before
    return out, max(0, held - out.numel() * out.element_size())
