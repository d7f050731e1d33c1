"""`python -m lib_rocm_sd bench door`: what an operator of torch's costs a call on the CPU.

The smallest attention there is, called directly and as an operator, which is registered in three
ways. What a way takes more than the direct call is what its door costs.
"""

from __future__ import annotations

import argparse
import math
from functools import cache
from typing import Any

import torch

from lib_rocm_sd import functional, torch_ops
from lib_rocm_sd.bench import call
from lib_rocm_sd.bench.call import CallRow, Side
from lib_rocm_sd.bench.progress import Countdown
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.torch_ops.attention import ATTEND

PROBLEM = AttentionProblem(1, 1, 1, 1, 8)
NAMESPACE = "rocm_sd_bench"
DIRECT, OURS = "functional.attention", "torch.ops.rocm_sd.attention"


def measure(device: torch.device, calls: int, limit_s: float = math.inf) -> list[CallRow]:
    """A row for each way, in turns."""
    return call.measured("one query", PROBLEM, device, _sides(), calls, limit_s)


@cache
def _sides() -> dict[str, tuple[str, Side]]:
    ours: Side = torch.ops.rocm_sd.attention.default
    found = {DIRECT: _direct, OURS: ours, **_others()}
    return {name: ("", side) for name, side in found.items()}


def _direct(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.attention(q, k, v)


def _others() -> dict[str, Side]:
    """As torch's documents recommend it, from 2.4 on."""
    if not torch_ops.KEEPS_WHOLE:
        return {}
    library = torch.library.Library(NAMESPACE, "DEF")
    library.define(ATTEND.name + ATTEND.schema)
    _LIVING.append(library)
    for key in ("CPU", "CUDA"):
        library.impl(ATTEND.name, functional.attention, key)
    torch.library.register_autograd(
        f"{NAMESPACE}::{ATTEND.name}", _no_backward, setup_context=_nothing_kept, lib=library
    )
    custom = torch.library.custom_op(
        f"{NAMESPACE}::custom", functional.attention, mutates_args=(), schema=ATTEND.schema
    )
    custom.register_autograd(_no_backward, setup_context=_nothing_kept)
    ops: Any = getattr(torch.ops, NAMESPACE)
    return {
        "Library, register_autograd": ops.attention.default,
        "custom_op, register_autograd": ops.custom.default,
    }


_LIVING: list[Any] = []
"""Operators are gone when their library is."""


def _no_backward(ctx: Any, grad: torch.Tensor) -> Any:
    raise NotImplementedError("nobody asks a benchmark for gradients")


def _nothing_kept(ctx: Any, inputs: Any, output: Any) -> None:
    """There is no backward pass."""


def run(
    args: argparse.Namespace, device: torch.device, machine: dict[str, Any], heading: str
) -> int:
    """Measure, print a table and what the doors cost, write JSON."""
    Countdown([1.0]).next(f"one query: {PROBLEM}")
    rows = measure(device, call.runs(args), call.limit_s(args))
    print(call.render(heading, rows))
    print(told(rows))
    call.write(args.json, machine, rows)
    return 0


def told(rows: list[CallRow]) -> str:
    """What each way takes beyond the direct call."""
    direct = next(row.median_us for row in rows if row.side == DIRECT)
    if direct is None:
        return "the direct call was not timed"
    costs = (
        f"{row.side} {row.median_us - direct:.1f} us"
        for row in rows
        if row.side != DIRECT and row.median_us is not None
    )
    return f"the door of an operator costs a call: {', '.join(costs)}"
