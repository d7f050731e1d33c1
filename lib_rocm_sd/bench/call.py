"""`python -m lib_rocm_sd bench call`: what one call of attention costs the CPU.

The time from the call in Python to its return, after which the device has the work in its queue and
is not waited for. The queue never fills: after each batch of calls the device is waited for.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd.bench.progress import Countdown
from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.engine.selftest import FAILURES, describe
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention.torch import SdpaAttention
from lib_rocm_sd.ops.base import Call

BATCH = 50
"""Calls between two waits: far fewer than a queue holds."""
CALLS, QUICK_CALLS = 10_000, 1_000
LIMIT_S, QUICK_LIMIT_S = 20.0, 2.0
"""How long a problem may take where --runs asks for no number of calls; a batch is made at least.
"""
BATCH_S = 0.5
"""On a CPU, where a call does all of the work, a batch has fewer calls than would take this long.
"""
PROBLEMS = (
    ("SD1.5, mid-block self", AttentionProblem(2, 8, 64, 64, 160)),
    ("SD1.5, mid-block text", AttentionProblem(2, 8, 64, 77, 160)),
    ("SDXL, 16x16 self", AttentionProblem(2, 20, 256, 256, 64)),
)
"""Small, so that the device has done its work before the next call comes."""

Side = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class CallRow:
    """One side on one problem; times in µs. `variant`: what the engine ran, or would."""

    label: str
    problem: str
    side: str
    variant: str
    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    runs: int = 0
    reason: str = ""


def measure(
    label: str,
    problem: AttentionProblem,
    device: torch.device,
    engine: Engine,
    calls: int,
    limit_s: float = math.inf,
) -> list[CallRow]:
    """A row per side, in one run: batches of the sides take turns, until `limit_s` is over."""
    with torch.no_grad():
        sides = _sides(problem, device, engine)
    return measured(label, problem, device, sides, calls, limit_s)


def measured(
    label: str,
    problem: AttentionProblem,
    device: torch.device,
    sides: Mapping[str, tuple[str, Side]],
    calls: int,
    limit_s: float,
) -> list[CallRow]:
    """A row per side. `sides`: by name, the variant behind it and the call."""
    rows: list[CallRow] = []
    with torch.no_grad():
        q, k, v, *_ = ATTENTION.make_inputs(problem, device, 1)
        times: dict[str, list[float]] = {name: [] for name in sides}
        failed: dict[str, str] = {}
        counts: dict[str, int] = {}
        for name, (_, call) in sides.items():
            try:
                counts[name] = _calls_of_a_batch(call, (q, k, v), device)
                _batch(call, (q, k, v), device, counts[name])
            except FAILURES as failure:
                failed[name] = describe(failure)
        end = time.monotonic() + limit_s
        while any(len(times[name]) < calls for name in counts if name not in failed):
            for name, (_, call) in sides.items():
                if name not in failed:
                    times[name] += _batch(call, (q, k, v), device, counts[name])
            if time.monotonic() > end:
                break
    for name, (variant, _) in sides.items():
        row = (label, str(problem), name, variant)
        if name in failed:
            rows.append(CallRow(*row, reason=failed[name]))
        else:
            rows.append(CallRow(*row, **_spread(times[name])))
    return rows


def _sides(
    problem: AttentionProblem, device: torch.device, engine: Engine
) -> dict[str, tuple[str, Side]]:
    """Name, the variant behind it, and the call. All begin with (B, S, H, D) views of
    (B, S, H*D) and give (B, Sq, H*D).
    """
    plan = engine.plan(problem, device)
    sdpa = SdpaAttention()

    def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa.run(Call(problem, AttentionInputs(q, k, v)))

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = engine.run(ATTENTION, AttentionInputs(q, k, v))
        return made

    def output_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q.new_empty((q.shape[0], q.shape[1], q.shape[2] * q.shape[3]))

    return {
        "engine.run": (plan.variant.name, ours),
        "scaled_dot_product_attention": ("sdpa", torchs),
        "an empty output": ("", output_alone),
    }


def _calls_of_a_batch(call: Side, inputs: Sequence[torch.Tensor], device: torch.device) -> int:
    """Calls between two waits. On a CPU no more than take BATCH_S together."""
    _batch(call, inputs, device, 1)
    if device.type == "cuda":
        return BATCH
    each_us = _batch(call, inputs, device, 1)[0]
    return min(max(int(1e6 * BATCH_S / max(each_us, 1.0)), 1), BATCH)


def _batch(
    call: Side, inputs: Sequence[torch.Tensor], device: torch.device, count: int
) -> list[float]:
    """Times in µs of `count` calls; the device has nothing to do before and after."""
    q, k, v = inputs
    clock = time.perf_counter_ns
    times = []
    for _ in range(count):
        begin = clock()
        call(q, k, v)
        times.append((clock() - begin) / 1000)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return times


def _spread(times: list[float]) -> dict[str, Any]:
    times = sorted(times)
    return {
        "median_us": statistics.median(times),
        "p10_us": times[len(times) // 10],
        "p90_us": times[len(times) * 9 // 10],
        "runs": len(times),
    }


def runs(args: argparse.Namespace) -> int:
    """Timed calls of a row."""
    return args.runs or (QUICK_CALLS if args.quick else CALLS)


def limit_s(args: argparse.Namespace) -> float:
    """How long a problem may take."""
    return math.inf if args.runs else QUICK_LIMIT_S if args.quick else LIMIT_S


def run(
    args: argparse.Namespace, device: torch.device, machine: dict[str, Any], heading: str
) -> int:
    """Measure, print a table, write JSON."""
    engine = Engine()
    rows: list[CallRow] = []
    progress = Countdown([1.0] * len(PROBLEMS))
    for label, problem in PROBLEMS:
        progress.next(f"{label}: {problem}")
        rows += measure(label, problem, device, engine, runs(args), limit_s(args))
    print(render(heading, rows))
    write(args.json, machine, rows)
    return 0


def write(path: str | None, machine: dict[str, Any], rows: Sequence[CallRow]) -> None:
    """The result as JSON, where one is asked for."""
    if path:
        document = {"machine": machine, "rows": [asdict(row) for row in rows]}
        Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def render(heading: str, rows: Sequence[CallRow]) -> str:
    """The table that a person reads."""
    lines = [heading, f"{'problem':<34} {'call':<30} {'CPU us':>7} {'p10..p90':>13} runs"]
    for row in rows:
        begin = f"{row.problem:<34} {row.side:<30}"
        if row.median_us is None:
            lines.append(f"{begin} not timed: {row.reason}")
            continue
        spread = f"{row.p10_us:.1f}..{row.p90_us:.1f}"
        lines.append(
            f"{begin} {row.median_us:>7.1f} {spread:>13} {row.runs} {row.variant}".rstrip()
        )
    return "\n".join(lines)
