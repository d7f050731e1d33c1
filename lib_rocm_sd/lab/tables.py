"""`python -m lib_rocm_sd bench OP`: an op's usual problems by every way, verified, then timed.

Norms stand beside a plain copy of their tensor. Bytes are those that must be moved. A GroupNorm's
image is read once for its statistics, once to be transformed, and written once; what makes a small
image in one launch reads it once, and is counted likewise, so that ways compare. A LayerNorm's
tensor is read and another written, or two and two where one is added. `of_copy` is the time over
what these bytes take at the copy's speed. Rows of LayerNorms and of gradients are small: their
times are those of the GPU, with a full queue.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.engine.measure import input_sets, timed
from lib_rocm_sd.engine.selftest import relative_error
from lib_rocm_sd.lab import rows as row_text
from lib_rocm_sd.lab.rows import (
    Columns,
    Countdown,
    Result,
    Row,
    TextTable,
    between,
    field,
    is_named,
    none_named,
    tiles,
)
from lib_rocm_sd.lab.timing import (
    Timer,
    figured,
    refusals_of,
    timed_with_a_full_queue,
    with_times,
)
from lib_rocm_sd.ops.base import Call, Launch, Op, Run, Variant
from lib_rocm_sd.ops.group_norm import kernel as group_norm_kernel
from lib_rocm_sd.ops.group_norm import launch as group_norm_launch
from lib_rocm_sd.ops.group_norm import problem as group_norm_problem
from lib_rocm_sd.ops.group_norm.op import GROUP_NORM_SILU
from lib_rocm_sd.ops.layer_norm import problem as layer_norm_problem
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM
from lib_rocm_sd.ops.linear import problem as linear_problem
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.problem import LinearProblem
from lib_rocm_sd.report import config_fields

BYTES_BESIDE, PRODUCTS_BESIDE = 1e6, 1e10
"""What a norm takes beside its bytes, a layer beside its operations: for the estimate of the time
left.
"""
Problems = list[tuple[str, Any]]


class Setting(NamedTuple):
    """Where a problem is measured, and how often."""

    device: torch.device
    info: DeviceInfo
    launch: Launch | None
    runs: int


@dataclass
class Table:
    """The table of an op. `problems`: labels and problems, the small odd ones or the usual ones of
    a dtype; `work`: about what measuring one takes depends on.
    """

    problems: Callable[[bool, str], Problems]
    work: Callable[[Any], float]
    measure: Callable[[str, Any, Setting], list[Row]]
    columns: Columns
    render: Callable[[str, Sequence[Row]], str]


def run(
    table: Table,
    args: argparse.Namespace,
    setting: Setting,
    machine: dict[str, Any],
    heading: str,
) -> int:
    """Measure, print the table, write JSON after each problem. 1 if ours was wrong, 2 if no case is
    left, 130 if interrupted.
    """
    chosen = [
        (label, problem)
        for label, problem in table.problems(args.small, args.dtype)
        if is_named(args.case, f"{label} {problem}")
    ]
    if not chosen:
        print(f"bench: {none_named(args.case)}", file=sys.stderr)
        return 2
    progress = Countdown([table.work(problem) for _, problem in chosen])

    def rows() -> Iterator[Row]:
        for label, problem in chosen:
            progress.next(f"{label}: {problem}")
            yield from table.measure(label, problem, setting)

    result = Result(table.columns, machine, args.json)
    status = result.collect(rows())
    print(table.render(heading, result.rows))
    return status or int(row_text.is_wrong(result.rows))


def odd(problems: Sequence[Any]) -> Problems:
    return [(f"odd {number}", problem) for number, problem in enumerate(problems, 1)]


def of_dtype(
    small_ones: Sequence[Any], usual: Sequence[tuple[str, Any]], small: bool, dtype: str
) -> Problems:
    if small:
        return odd(small_ones)
    return [(label, replace(problem, dtype=dtype)) for label, problem in usual]


def _ways(
    variants: Sequence[Variant[Any, Any]], start: Row, problem: Any, setting: Setting
) -> Iterator[tuple[Row, Variant[Any, Any] | None, Any]]:
    """The row, variant and config of all that can run a problem; of what cannot, the row alone."""
    for variant in variants:
        row = replace(start, way=variant.name)
        refusals = refusals_of(variant, problem, setting.info, setting.launch)
        if refusals:
            yield replace(row, reason="; ".join(refusals)), None, None
            continue
        for config in variant.configs(setting.info.arch, problem):
            yield replace(row, config=config_fields(config)), variant, config


def calls(run: Run, problem: Any, launch: Launch | None, config: Any) -> Callable[[Any], Any]:
    """A variant's `run`, given inputs alone."""
    return lambda inputs: run(Call(problem, inputs, launch, config))


US = field("us", 9, "median", ".1f")
ERROR = field("error", 8, "error", ".1e")
JSON = "label=case problem way config median_us=median p10_us=p10 p90_us=p90 error reason"


def rendered(text: TextTable) -> Callable[[str, Sequence[Row]], str]:
    return lambda heading, rows: "\n".join([heading, *text.lines(rows)])


# -- norms ----------------------------------------------------------------------------------------


class Beside:
    """The rows of a norm's problem, the first a copy of its tensor of `size` bytes."""

    def __init__(
        self, op: Op[Any, Any], label: str, problem: Any, size: int, setting: Setting, timer: Timer
    ) -> None:
        self.op, self.setting, self.timer = op, setting, timer
        self.sets = input_sets(op, problem, setting.device)
        exact = op.reference(self.sets[0])
        self.exact = [t for t in (exact if isinstance(exact, tuple) else [exact]) if t is not None]
        self.start = Row(case=label, problem=str(problem), way="copy")
        copied = torch.empty_like(self.sets[0].x)
        self.rows: list[Row] = []
        self.add(self.start, lambda inputs: copied.copy_(inputs.x), 2 * size)

    def add(self, row: Row, call: Callable[[Any], Any], moved_bytes: int) -> None:
        """A row with its times, and with the speed at which it moves so many bytes."""
        self.rows.append(self._timed(row, call, moved_bytes))

    def _timed(self, row: Row, call: Callable[[Any], Any], moved_bytes: int) -> Row:
        def once(number: int) -> None:
            call(self.sets[number % len(self.sets)])

        row = with_times(row, once, self.setting.runs, self.setting.device, self.timer)
        return replace(row, gigabytes_per_s=moved_bytes / row.median / 1e3)

    def verify(self, row: Row, call: Callable[[Any], Any], moved_bytes: int) -> None:
        """The same once it is right, or the reason why not. Of several outputs each is compared."""

        def error() -> float:
            output = call(self.sets[0])
            outputs = output if isinstance(output, tuple) else (output,)
            pairs = zip(outputs, self.exact, strict=True)
            return max(relative_error(each, exact) for each, exact in pairs)

        tolerance = self.op.tolerance(self.op.problem_of(self.sets[0]))
        timed_row = partial(self._timed, row, call, moved_bytes)
        self.rows.append(figured(row, error, tolerance, timed_row))

    def finished(self) -> list[Row]:
        """The rows, each with its time over what its bytes take at the speed of the copy."""
        speed = self.rows[0].gigabytes_per_s
        return [replace(row, of_copy=speed / row.gigabytes_per_s) for row in self.rows]


NORM_COLUMNS = Columns(f"{JSON} gigabytes_per_s of_copy")
NORM_TEXT = TextTable(
    (field("problem", -52, "problem"), field("way", -12, "way")),
    (
        *(US, between(17)),
        *(field("GB/s", 7, "gigabytes_per_s", ".0f"), field("of copy", 7, "of_copy", ".2f")),
        ERROR,
    ),
    tiles,
)


def _group_norms(small: bool, dtype: str) -> Problems:
    """The usual problems, each in both memory formats, or the small odd ones."""
    if small:
        return odd(group_norm_problem.ODD)
    return [
        (label, replace(problem, dtype=dtype, affine=dtype, channels_last=channels_last))
        for label, problem in group_norm_problem.USUAL
        for channels_last in (True, False)
    ]


def _measured_group_norm(label: str, problem: Any, setting: Setting) -> list[Row]:
    """A copy, every variant and config that is right, and the steps of our default config."""
    size, launch, arch = problem.image_bytes, setting.launch, setting.info.arch
    with torch.no_grad():
        rows = Beside(GROUP_NORM_SILU, label, problem, size, setting, timed)
        for row, variant, config in _ways(GROUP_NORM_SILU.every, rows.start, problem, setting):
            if variant is None:
                rows.rows.append(row)
                continue
            own = launch if variant.ours else None
            rows.verify(row, calls(variant.run, problem, own, config), 3 * size)
            if variant.ours and arch and config == group_norm_kernel.configs(arch)[0]:
                _add_steps(rows, row, launch, config, size)
    return rows.finished()


def _add_steps(rows: Beside, row: Row, launch: Launch | None, config: Any, size: int) -> None:
    """Statistics, finalize and apply, each on its own."""
    if launch is None:
        return
    x, gamma, beta, groups, eps, silu, _ = rows.sets[0]
    affine = (gamma, beta, groups, eps)
    parts = group_norm_launch.launch_statistics(launch, config, x)
    norm = group_norm_launch.launch_finalize(launch, config, parts, *affine)
    steps: tuple[tuple[str, Callable[[Any], Any], int], ...] = (
        ("statistics", lambda i: group_norm_launch.launch_statistics(launch, config, i.x), size),
        (
            "finalize",
            lambda _: group_norm_launch.launch_finalize(launch, config, parts, *affine),
            parts.numel() * 4,
        ),
        (
            "apply",
            lambda i: group_norm_launch.launch_apply(launch, config, i.x, norm, silu),
            2 * size,
        ),
    )
    for name, call, moved_bytes in steps:
        rows.add(replace(row, way=f"  {name}"), call, moved_bytes)


def _layer_norms(small: bool, dtype: str) -> Problems:
    if small:
        return odd(layer_norm_problem.ODD)
    return [
        (label, replace(p, dtype=dtype, affine=p.affine if p.affine == "none" else dtype))
        for label, p in layer_norm_problem.USUAL
    ]


def _measured_layer_norm(label: str, problem: Any, setting: Setting) -> list[Row]:
    """A copy, and every variant and config that is right, as the engine calls it."""
    size = problem.tensor_bytes
    moved_bytes = (4 if problem.added else 2) * size
    with torch.no_grad():
        rows = Beside(LAYER_NORM, label, problem, size, setting, timed_with_a_full_queue)
        for row, variant, config in _ways(LAYER_NORM.variants, rows.start, problem, setting):
            if variant is None:
                rows.rows.append(row)
                continue
            launch = setting.launch if variant.ours else None
            bound = variant.bound(Call(problem, rows.sets[0], launch, config))
            rows.verify(row, calls(bound, problem, launch, config), moved_bytes)
    return rows.finished()


# -- linear layers --------------------------------------------------------------------------------


_LINEAR_TEXT = TextTable(
    (field("layer", -40, "case"), field("problem", -60, "problem"), field("way", -15, "way")),
    (US, between(17), field("TFLOP/s", 8, "tflops", ".1f"), ERROR),
    tiles,
)


def operations(problem: LinearProblem) -> int:
    """Floating-point operations of the layer's products, two for each."""
    return 2 * problem.rows * problem.k * problem.weight_rows


def _measured_linear(label: str, problem: Any, setting: Setting) -> list[Row]:
    """Every variant and config that is right; ours in the order in which it would be tried."""
    rows: list[Row] = []
    start, device = Row(case=label, problem=str(problem)), setting.device
    with torch.no_grad():
        sets = input_sets(LINEAR, problem, device)
        exact = LINEAR.reference(sets[0])
        before = None if sets[0].residual is None else sets[0].residual.clone()
        for row, variant, config in _ways(LINEAR.every, start, problem, setting):
            if variant is None:
                rows.append(row)
                continue
            launch = setting.launch if variant.ours else None
            call = calls(variant.run, problem, launch, config)
            residual = None if before is None else before.clone()  # which may be written over
            fresh = sets[0]._replace(residual=residual, out=residual if problem.in_place else None)

            def timed_row(row: Row = row, call: Callable[[Any], Any] = call) -> Row:
                row = with_times(row, lambda n: call(sets[n % len(sets)]), setting.runs, device)
                return replace(row, tflops=operations(problem) / row.median / 1e6)

            def error(fresh: Any = fresh, call: Callable[[Any], torch.Tensor] = call) -> float:
                return relative_error(call(fresh), exact)

            rows.append(figured(row, error, LINEAR.tolerance(problem), timed_row))
    return rows


TABLES: dict[str, Table] = {
    "group_norm": Table(
        _group_norms,
        lambda problem: BYTES_BESIDE + problem.image_bytes,
        _measured_group_norm,
        NORM_COLUMNS,
        rendered(NORM_TEXT),
    ),
    "layer_norm": Table(
        _layer_norms,
        lambda problem: BYTES_BESIDE + problem.tensor_bytes,
        _measured_layer_norm,
        NORM_COLUMNS,
        rendered(NORM_TEXT),
    ),
    "linear": Table(
        partial(of_dtype, linear_problem.ODD, linear_problem.USUAL),
        lambda problem: PRODUCTS_BESIDE + operations(problem),
        _measured_linear,
        Columns(f"{JSON} tflops"),
        rendered(_LINEAR_TEXT),
    ),
}
