"""`python -m lib_rocm_sd bench call` and `bench door`: what one call of attention costs the CPU.

The time from the call in Python to its return, after which the device has the work in its queue and
is not waited for. The queue never fills: after each batch of calls the device is waited for.

`door`: the smallest attention there is, called directly and as an operator of torch's, which is
registered in three ways. What a way takes more than the direct call is what its door costs.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from lib_rocm_sd import functional, torch_ops
from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.engine.selftest import FAILURES, describe
from lib_rocm_sd.lab.benchmark import Benchmark, Setting
from lib_rocm_sd.lab.rows import Columns, Countdown, Row, TextTable, between, field, spread
from lib_rocm_sd.lab.timing import wait
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention.torch import SdpaAttention
from lib_rocm_sd.ops.base import Call
from lib_rocm_sd.torch_ops.table import ATTEND

BATCH = 50
"""Calls between two waits: far fewer than a queue holds."""
CALLS, QUICK_CALLS = 10_000, 1_000
LIMIT_S, QUICK_LIMIT_S = 20.0, 2.0
"""How long a problem may take where --runs asks for no number of calls; a batch is made at least.
"""
PROBLEMS = (
    ("SD1.5, mid-block self", AttentionProblem(2, 8, 64, 64, 160)),
    ("SD1.5, mid-block text", AttentionProblem(2, 8, 64, 77, 160)),
    ("SDXL, 16x16 self", AttentionProblem(2, 20, 256, 256, 64)),
)
"""Small, so that the device has done its work before the next call comes."""
DOOR_PROBLEM = AttentionProblem(1, 1, 1, 1, 8)
NAMESPACE = "rocm_sd_bench"
DIRECT, OPERATOR = "functional.attention", "torch.ops.rocm_sd.attention"
COLUMNS = Columns(
    "label=case problem side=way variant median_us=median p10_us=p10 p90_us=p90 runs reason"
)
TEXT = TextTable(
    (field("problem", -34, "problem"), field("call", -30, "way")),
    (field("CPU us", 7, "median", ".1f"), between(13)),
    lambda row: f" {row.runs} {row.variant}",
    absent="not timed",
    head_tail=" runs",
)

Side = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _rows(args: argparse.Namespace, setting: Setting) -> Iterator[Row]:
    """The rows of `bench call` and of `bench door`."""
    engine = Engine()
    problems = PROBLEMS if args.op == "call" else (("one query", DOOR_PROBLEM),)
    limit_s = math.inf if args.runs else QUICK_LIMIT_S if args.quick else LIMIT_S
    progress = Countdown([1.0] * len(problems))
    for label, problem in problems:
        progress.next(f"{label}: {problem}")
        with torch.no_grad():
            sides = _sides(problem, setting.device, engine) if args.op == "call" else doors()
        yield from measure(label, problem, setting.device, sides, setting.runs, limit_s)


def measure(
    label: str,
    problem: AttentionProblem,
    device: torch.device,
    sides: Mapping[str, tuple[str, Side]],
    calls: int,
    limit_s: float = math.inf,
) -> list[Row]:
    """A row per side, in one run: batches of the sides take turns, until `limit_s` is over. Times
    in µs. `sides`: by name, the variant behind it and the call. All begin with (B, S, H, D) views
    of (B, S, H*D) and give (B, Sq, H*D).
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    failures: dict[str, str] = {}
    with torch.no_grad():
        q, k, v, *_ = ATTENTION.make_inputs(problem, device, 1)
        for name, (_, call) in sides.items():
            try:
                _batch(call, (q, k, v), device)
            except FAILURES as failure:
                failures[name] = describe(failure)
        end = time.monotonic() + limit_s
        names = [name for name in sides if name not in failures]
        while any(len(times[name]) < calls for name in names):
            for name in names:
                times[name] += _batch(sides[name][1], (q, k, v), device)
            if time.monotonic() > end:
                break
    return [
        Row(
            case=label,
            problem=str(problem),
            way=name,
            variant=variant,
            reason=failures.get(name, ""),
            **({} if name in failures else spread(times[name])),
        )
        for name, (variant, _) in sides.items()
    ]


def _batch(call: Side, inputs: Sequence[torch.Tensor], device: torch.device) -> list[float]:
    """Times in µs of BATCH calls; the device has nothing to do before and after."""
    q, k, v = inputs
    clock = time.perf_counter_ns
    times = []
    for _ in range(BATCH):
        begin = clock()
        call(q, k, v)
        times.append((clock() - begin) / 1000)
    wait(device)
    return times


def _sides(
    problem: AttentionProblem, device: torch.device, engine: Engine
) -> dict[str, tuple[str, Side]]:
    """The engine, torch, and no work at all."""
    plan = engine.plan(problem, device)
    sdpa = SdpaAttention()

    def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa.run(Call(problem, AttentionInputs(q, k, v)))

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = engine.run(ATTENTION, AttentionInputs(q, k, v))
        return output

    def output_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q.new_empty((q.shape[0], q.shape[1], q.shape[2] * q.shape[3]))

    return {
        "engine.run": (plan.variant.name, ours),
        "scaled_dot_product_attention": ("sdpa", torchs),
        "an empty output": ("", output_alone),
    }


@cache
def doors() -> dict[str, tuple[str, Side]]:
    """The direct call, our operator, and others as torch's documents recommend it from 2.4 on."""
    sides: dict[str, Side] = {
        DIRECT: lambda q, k, v: functional.attention(q, k, v),
        OPERATOR: torch.ops.rocm_sd.attention.default,
    }
    if torch_ops.KEEPS_WHOLE:
        library = torch.library.Library(NAMESPACE, "DEF")
        library.define(ATTEND.name + ATTEND.schema)
        _LIVING.append(library)
        for key in ("CPU", "CUDA"):
            library.impl(ATTEND.name, functional.attention, key)
        name = f"{NAMESPACE}::{ATTEND.name}"
        torch.library.register_autograd(
            name, _no_backward, setup_context=_nothing_kept, lib=library
        )
        custom = torch.library.custom_op(
            f"{NAMESPACE}::custom", functional.attention, mutates_args=(), schema=ATTEND.schema
        )
        custom.register_autograd(_no_backward, setup_context=_nothing_kept)
        ops: Any = getattr(torch.ops, NAMESPACE)
        sides["Library, register_autograd"] = ops.attention.default
        sides["custom_op, register_autograd"] = ops.custom.default
    return {name: ("", side) for name, side in sides.items()}


_LIVING: list[Any] = []
"""Operators are gone when their library is."""


def _no_backward(ctx: Any, grad: torch.Tensor) -> Any:
    raise NotImplementedError("nobody asks a benchmark for gradients")


def _nothing_kept(ctx: Any, inputs: Any, output: Any) -> None:
    """There is no backward pass."""


def told(rows: Sequence[Row]) -> str:
    """What each way takes beyond the direct call."""
    direct_us = next(row.median for row in rows if row.way == DIRECT)
    if math.isnan(direct_us):
        return "the direct call was not timed"
    costs = (
        f"{row.way} {row.median - direct_us:.1f} us"
        for row in rows
        if row.way != DIRECT and not math.isnan(row.median)
    )
    return f"the door of an operator costs a call: {', '.join(costs)}"


def _door_rendered(heading: str, rows: Sequence[Row]) -> str:
    return f"{TEXT.under(heading, rows)}\n{told(rows)}"


BENCHMARKS = {
    "call": Benchmark(COLUMNS, _rows, TEXT.under, (CALLS, QUICK_CALLS)),
    "door": Benchmark(COLUMNS, _rows, _door_rendered, (CALLS, QUICK_CALLS)),
}
