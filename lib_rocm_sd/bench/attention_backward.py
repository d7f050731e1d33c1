"""Attention forward and backward timed, as in training: ours by every config, torch's backends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from lib_rocm_sd.bench.attention import timing
from lib_rocm_sd.bench.rows import TimedRow, figured, refusals_of, spread, tiles
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.engine.measure import input_sets
from lib_rocm_sd.engine.selftest import relative_error
from lib_rocm_sd.engine.timing import queued
from lib_rocm_sd.ops.attention.backends import BACKENDS, SdpaBackend
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention.torch import SdpaAttention
from lib_rocm_sd.ops.attention.with_lse import MatrixForward
from lib_rocm_sd.ops.attention_backward.inputs import AttentionBackwardInputs, Grads
from lib_rocm_sd.ops.attention_backward.op import ATTENTION_BACKWARD
from lib_rocm_sd.ops.attention_backward.ours import MatrixBackward
from lib_rocm_sd.ops.attention_backward.problem import ODD, USUAL
from lib_rocm_sd.ops.attention_backward.torch import SlicedBackward
from lib_rocm_sd.ops.base import Call, Launch
from lib_rocm_sd.report import config_fields

OURS, FLASH = "rocm_sd", "sdpa flash"
OPERATIONS_BESIDE = 1e11
"""What a problem takes beside its products, as operations: for the estimate of the time left."""
ALLOWANCE = 2.0
"""Times the op's tolerance that torch's backends may be off: some round more."""


@dataclass(frozen=True)
class BackwardRow(TimedRow):
    """One way to run one problem. The times of a row are those of forward and backward together;
    `backward_us` is the median of the backward alone, `tflops` counts seven products.
    """

    backward_us: float = math.nan
    tflops: float = math.nan


@dataclass(frozen=True)
class _Way:
    """`both(inputs)`: forward and backward. `backward(inputs)` makes what is called, again and
    again, for the backward alone.
    """

    row: BackwardRow
    both: Callable[[AttentionBackwardInputs], Grads]
    backward: Callable[[AttentionBackwardInputs], Callable[[], Any]]


def problems(small: bool, dtype: str) -> list[tuple[str, AttentionProblem]]:
    """What training asks for, or the small odd problems."""
    if small:
        return [(f"odd {number}", problem) for number, problem in enumerate(ODD, 1)]
    return [(label, replace(problem, dtype=dtype)) for label, problem in USUAL]


def work(problem: AttentionProblem) -> float:
    """About what measuring it takes depends on."""
    return OPERATIONS_BESIDE + 4 * problem.flops


def measure(
    label: str,
    problem: AttentionProblem,
    device: torch.device,
    info: DeviceInfo,
    launch: Launch | None,
    runs: int,
) -> list[BackwardRow]:
    """Every way that is right; ours in the order in which configs would be tried."""
    with torch.no_grad():
        sets = input_sets(ATTENTION_BACKWARD, problem, device)
        exact = _exact(sets[0])
        return [
            way if isinstance(way, BackwardRow) else _verified(way, problem, sets, exact, runs)
            for way in _ways(label, problem, info, launch)
        ]


def _exact(inputs: AttentionBackwardInputs) -> Grads:
    """In float64 and slices."""
    q, k, v, output, grad, lse = (t.double() for t in inputs[:6])
    wide = AttentionBackwardInputs(q, k, v, output, grad, lse, inputs.mask, inputs.scale)
    return SlicedBackward().run(Call(ATTENTION_BACKWARD.problem_of(wide), wide))


def _ways(
    label: str, problem: AttentionProblem, info: DeviceInfo, launch: Launch | None
) -> Iterator[_Way | BackwardRow]:
    empty = BackwardRow(label, str(problem), OURS)
    ours = MatrixBackward()
    refusals = refusals_of(ours, problem, info, launch)
    refusals += [] if refusals else refusals_of(MatrixForward(), problem, info, launch)
    if refusals:
        yield replace(empty, reason="; ".join(refusals))
    else:
        for config in ours.configs(info.arch, problem):
            row = replace(empty, config=config_fields(config))
            yield _our_way(row, problem, info, launch, config)
    for variant in (SdpaAttention(), *(SdpaBackend(name) for name in BACKENDS)):
        row = replace(empty, way=variant.name)
        refusals = variant.refusals(info.arch, problem)
        if refusals:
            yield replace(row, reason="; ".join(refusals))
        else:
            yield from _torchs_ways(row, partial(_followed, variant, problem))


def _our_way(
    row: BackwardRow,
    problem: AttentionProblem,
    info: DeviceInfo,
    launch: Launch | None,
    config: Any,
) -> _Way:
    forward = MatrixForward()
    tiling = forward.configs(info.arch, problem)[0]

    def backward(inputs: AttentionBackwardInputs) -> Grads:
        return MatrixBackward().run(Call(problem, inputs, launch, config))

    def both(inputs: AttentionBackwardInputs) -> Grads:
        output, lse = forward.run(Call(problem, inputs.forward, launch, tiling))
        return backward(inputs._replace(output=output, lse=lse))

    return _Way(row, both, lambda inputs: partial(backward, inputs))


def _torchs_ways(row: BackwardRow, followed: Callable[..., Any]) -> Iterator[_Way]:
    """Flash adds the gradient of q by atomics unless it is told not to, as ours never does."""
    both, backward = partial(_both_by_torch, followed), partial(_backward_only, followed)
    yield _Way(row, both, backward)
    if row.way == FLASH:

        def told(inputs: AttentionBackwardInputs) -> Callable[[], Any]:
            return partial(_deterministic, backward(inputs))

        row = replace(row, way=f"{FLASH}, same bits")
        yield _Way(row, partial(_deterministic, both), told)


def _deterministic(call: Callable[..., Any], *args: Any) -> Any:
    """`call` where torch has been asked for the same bits every time, and for nothing beside."""
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    switches: Any = getattr(torch.utils, "deterministic", SimpleNamespace())  # torch 2.2 and later
    fills = getattr(switches, "fill_uninitialized_memory", True)
    switches.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        return call(*args)
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        switches.fill_uninitialized_memory = fills


def _followed(
    variant: SdpaAttention, problem: AttentionProblem, inputs: AttentionBackwardInputs
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k and v from which autograd follows, and the output."""
    q, k, v = (t.detach().requires_grad_() for t in inputs[:3])
    with torch.enable_grad():
        call = AttentionInputs(q, k, v, inputs.mask, inputs.scale)
        return [q, k, v], variant.run(Call(problem, call))


def _both_by_torch(followed: Callable[..., Any], inputs: AttentionBackwardInputs) -> Grads:
    given, output = followed(inputs)
    of_q, of_k, of_v = torch.autograd.grad(output, given, inputs.grad)
    return of_q, of_k, of_v


def _backward_only(
    followed: Callable[..., Any], inputs: AttentionBackwardInputs
) -> Callable[[], Any]:
    given, output = followed(inputs)
    return lambda: torch.autograd.grad(output, given, inputs.grad, retain_graph=True)


def _verified(
    way: _Way,
    problem: AttentionProblem,
    sets: Sequence[AttentionBackwardInputs],
    exact: Grads,
    runs: int,
) -> BackwardRow:
    """The way's row with figures, or the reason why not."""

    def error() -> float:
        pairs = zip(way.both(sets[0]), exact, strict=True)
        return max(relative_error(made, right) for made, right in pairs)

    allowance = 1.0 if way.row.way == OURS else ALLOWANCE
    tolerance = allowance * ATTENTION_BACKWARD.tolerance(problem)
    return figured(way.row, error, tolerance, lambda: _timed(way, problem, sets, runs))


def _timed(
    way: _Way, problem: AttentionProblem, sets: Sequence[AttentionBackwardInputs], runs: int
) -> BackwardRow:
    alone = way.backward(sets[0])
    both = _figures(lambda number: way.both(sets[number % len(sets)]), sets[0].q.device, runs)
    backward = _figures(lambda number: alone(), sets[0].q.device, runs)
    row = replace(way.row, **both, backward_us=backward["median_us"])  # type: ignore[arg-type]
    return replace(row, tflops=3.5 * problem.flops / row.median_us / 1e6)


def _figures(once: Callable[[int], Any], device: torch.device, runs: int) -> dict[str, float]:
    """Figures from GPU times with the next call already queued, or from plain times on a CPU."""
    if device.type != "cuda":
        return spread(once, runs, device)
    submit_s = timing.warm_up(once, device)

    def timer(call: Callable[[int], None], count: int, where: torch.device) -> list[float]:
        return queued(call, count, where, submit_s)

    return spread(once, runs, device, timer)


def render(heading: str, rows: list[BackwardRow]) -> str:
    """The table that a person reads. `ours/it`: how long ours takes of its time, both passes."""
    lines = [heading, "us: forward and backward; TFLOP/s: of seven products"]
    for label in dict.fromkeys((row.label, row.problem) for row in rows):
        group = [row for row in rows if (row.label, row.problem) == label]
        best = min((row.median_us for row in group if row.way == OURS), default=math.nan)
        lines += ["", f"{label[0]}: {label[1]}"]
        lines.append(
            f"  {'way':<22} {'us':>9} {'p10..p90':>17} {'backward':>9} {'ours/it':>7} "
            f"{'TFLOP/s':>7} {'error':>8}"
        )
        lines += [_line(row, best) for row in group]
    return "\n".join(lines)


def _line(row: BackwardRow, ours_us: float) -> str:
    if row.reason:
        return f"  {row.way:<22} not run: {row.reason}"
    between = f"{row.p10_us:.1f}..{row.p90_us:.1f}"
    ratio = ours_us / row.median_us
    shown = f"{ratio:.2f}" if math.isfinite(ratio) else "-"
    return (
        f"  {row.way:<22} {row.median_us:>9.1f} {between:>17} {row.backward_us:>9.1f} {shown:>7} "
        f"{row.tflops:>7.1f} {row.error:>8.1e} {tiles(row)}".rstrip()
    )
