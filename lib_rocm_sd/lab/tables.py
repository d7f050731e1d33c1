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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lib_rocm_sd.checks import UsageError
from lib_rocm_sd.engine.measure import input_sets, timed
from lib_rocm_sd.engine.selftest import FAILURES, describe, relative_error
from lib_rocm_sd.lab.benchmark import Benchmark, Setting
from lib_rocm_sd.lab.rows import (
    NAN,
    Columns,
    Countdown,
    Row,
    TextTable,
    between,
    field,
    is_named,
    spread,
    tiles,
)
from lib_rocm_sd.lab.timing import WARM_UP, Timer, timed_with_a_full_queue
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


@dataclass
class ByProblem:
    """The rows of an op's problems, one problem after the other. `problems`: labels and problems,
    the small odd ones or the usual ones of a dtype; `work`: about what measuring one takes depends
    on.
    """

    problems: Callable[[bool, str], Problems]
    work: Callable[[Any], float]
    measure: Callable[[str, Any, Setting], list[Row]]

    def __call__(self, args: argparse.Namespace, setting: Setting) -> Iterator[Row]:
        """Raises UsageError where no case is left."""
        cases = named_cases(self.problems(args.small, args.dtype), args.case)
        progress = Countdown([self.work(problem) for _, problem in cases])

        def rows() -> Iterator[Row]:
            for label, problem in cases:
                progress.next(f"{label}: {problem}")
                yield from self.measure(label, problem, setting)

        return rows()


def named_cases(problems: Problems, words: Sequence[str] | None) -> Problems:
    """Those with a word of --case in their name or shape; all where there are no words. Raises
    UsageError where none is left.
    """
    cases = [(label, p) for label, p in problems if is_named(words, f"{label} {p}")]
    if not cases:
        raise UsageError(f"--case: no case has {' or '.join(words or ())} in its name or shape")
    return cases


def odd(problems: Sequence[Any]) -> Problems:
    return [(f"odd {number}", problem) for number, problem in enumerate(problems, 1)]


def of_dtype(module: Any, small: bool, dtype: str) -> Problems:
    """The problems of an op, whose problem.py this is."""
    if small:
        return odd(module.ODD)
    return [(label, in_dtype(problem, dtype)) for label, problem in module.USUAL]


def in_dtype(problem: Any, dtype: str) -> Any:
    """The problem in another dtype, with its gamma and beta, if it has any."""
    has_affine = getattr(problem, "affine", "none") != "none"
    return replace(problem, dtype=dtype, **({"affine": dtype} if has_affine else {}))


class Bench:
    """The rows of one problem of an op: of each way its times once it is right, or why not.

    `exact`: what is right, of the inputs; by default the op's reference.
    """

    def __init__(
        self,
        op: Op[Any, Any],
        label: str,
        problem: Any,
        setting: Setting,
        timer: Timer = timed,
        exact: Callable[[Any], Any] | None = None,
    ) -> None:
        self.problem, self.setting, self.timer = problem, setting, timer
        self.sets = input_sets(op, problem, setting.device)
        self.exact = _tensors((exact or op.reference)(self.sets[0]))
        self.tolerance = op.tolerance(problem)
        self.start = Row(case=label, problem=str(problem))
        self.rows: list[Row] = []

    def ways(
        self, variants: Sequence[Variant[Any, Any]], *beside: Variant[Any, Any]
    ) -> Iterator[tuple[Row, Variant[Any, Any], Call[Any, Any]]]:
        """Row, variant and call, for each config, of what can run the problem. What cannot, or
        needs what stands `beside` it and cannot, has a row of reasons.
        """
        setting = self.setting
        for variant in variants:
            row = replace(self.start, way=variant.name)
            every = (setting.refusals(each, self.problem) for each in (variant, *beside))
            refusals = next(filter(None, every), [])
            if refusals:
                self.rows.append(replace(row, reason="; ".join(refusals)))
                continue
            launch = setting.launch if variant.ours else None
            for config in variant.configs(setting.info.arch, self.problem):
                call = Call(self.problem, self.sets[0], launch, config)
                yield replace(row, config=config_fields(config)), variant, call

    def timed(
        self, row: Row, call: Callable[[Any], Any], moved_bytes: float = NAN, flops: float = NAN
    ) -> Row:
        """The row with times of `call`, given inputs, after a few that do not count."""

        def once(number: int) -> None:
            call(self.sets[number % len(self.sets)])

        timed(once, WARM_UP, self.setting.device)
        row = replace(row, **spread(self.timer(once, self.setting.runs, self.setting.device)))
        row = replace(row, gigabytes_per_s=moved_bytes / row.median / 1e3)
        return replace(row, tflops=flops / row.median / 1e6)

    def verify(
        self,
        row: Row,
        call: Callable[[Any], Any],
        *,
        first: Any = None,
        allowance: float = 1.0,
        also: Callable[[Row], Row] = lambda row: row,
        **work: float,
    ) -> None:
        """Add the row with times if all outputs are right, else with the reason. `first`: the
        inputs that are compared; `allowance`: of the op's tolerance; `also`: what else is timed.
        """
        try:
            outputs = _tensors(call(self.sets[0] if first is None else first))
            pairs = zip(outputs, self.exact, strict=True)
            error = max(relative_error(output, exact) for output, exact in pairs)
            if error <= allowance * self.tolerance:
                row = replace(also(self.timed(row, call, **work)), error=error)
            else:
                row = replace(row, error=error, reason=f"wrong: error {error:.1e}")
        except FAILURES as failure:
            row = replace(row, reason=describe(failure))
        self.rows.append(row)

    def copy(self, size: int) -> None:
        """Add the row of a plain copy of a norm's tensor of `size` bytes."""
        copied = torch.empty_like(self.sets[0].x)
        row = replace(self.start, way="copy")
        self.rows.append(self.timed(row, lambda inputs: copied.copy_(inputs.x), 2 * size))

    def beside_copy(self) -> list[Row]:
        """The rows, each with its time over what its bytes take at the speed of the copy."""
        speed = self.rows[0].gigabytes_per_s
        return [replace(row, of_copy=speed / row.gigabytes_per_s) for row in self.rows]


def _tensors(outputs: Any) -> list[torch.Tensor]:
    """The outputs that there are, of one or several."""
    return [t for t in (outputs if isinstance(outputs, tuple) else (outputs,)) if t is not None]


def given_inputs(run: Run, call: Call[Any, Any]) -> Callable[[Any], Any]:
    """A variant's `run`, given inputs alone."""
    return lambda inputs: run(Call(call.problem, inputs, call.launch, call.config))


JSON = "label=case problem way config median_us=median p10_us=p10 p90_us=p90 error reason"
US = field("us", 9, "median", ".1f")
ERROR = field("error", 8, "error", ".1e")


# -- norms ----------------------------------------------------------------------------------------


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
    problems = of_dtype(group_norm_problem, small, dtype)
    if small:
        return problems
    return [(label, replace(p, channels_last=c)) for label, p in problems for c in (True, False)]


@torch.no_grad()
def _measured_group_norm(label: str, problem: Any, setting: Setting) -> list[Row]:
    """A copy, every variant and config that is right, and the steps of our default config."""
    size, arch = problem.image_bytes, setting.info.arch
    bench = Bench(GROUP_NORM_SILU, label, problem, setting)
    bench.copy(size)
    for row, variant, call in bench.ways(GROUP_NORM_SILU.every):
        bench.verify(row, given_inputs(variant.run, call), moved_bytes=3 * size)
        if variant.ours and arch and call.config == group_norm_kernel.configs(arch)[0]:
            _add_steps(bench, row, call.launcher, call.config, size)
    return bench.beside_copy()


def _add_steps(bench: Bench, row: Row, launch: Launch, config: Any, size: int) -> None:
    """Statistics, finalize and apply, each on its own."""
    x, gamma, beta, groups, eps, silu, _ = bench.sets[0]
    affine = (gamma, beta, groups, eps)
    parts = group_norm_launch.launch_statistics(launch, config, x)
    norm = group_norm_launch.launch_finalize(launch, config, parts, *affine)

    def statistics(inputs: Any) -> None:
        group_norm_launch.launch_statistics(launch, config, inputs.x)

    def finalize(inputs: Any) -> None:
        group_norm_launch.launch_finalize(launch, config, parts, *affine)

    def apply(inputs: Any) -> None:
        group_norm_launch.launch_apply(launch, config, inputs.x, norm, silu)

    steps = ((statistics, size), (finalize, parts.numel() * 4), (apply, 2 * size))
    for step, moved_bytes in steps:
        bench.rows.append(bench.timed(replace(row, way=f"  {step.__name__}"), step, moved_bytes))


@torch.no_grad()
def _measured_layer_norm(label: str, problem: Any, setting: Setting) -> list[Row]:
    """A copy, and every variant and config that is right, as the engine calls it."""
    size = problem.tensor_bytes
    bench = Bench(LAYER_NORM, label, problem, setting, timed_with_a_full_queue)
    bench.copy(size)
    for row, variant, call in bench.ways(LAYER_NORM.variants):
        moved_bytes = (4 if problem.added else 2) * size
        bench.verify(row, given_inputs(variant.bound(call), call), moved_bytes=moved_bytes)
    return bench.beside_copy()


# -- linear layers --------------------------------------------------------------------------------


_LINEAR_TEXT = TextTable(
    (field("layer", -40, "case"), field("problem", -60, "problem"), field("way", -15, "way")),
    (US, between(17), field("TFLOP/s", 8, "tflops", ".1f"), ERROR),
    tiles,
)


def operations(problem: LinearProblem) -> int:
    """Floating-point operations of the layer's products, two for each."""
    return 2 * problem.rows * problem.k * problem.weight_rows


@torch.no_grad()
def _measured_linear(label: str, problem: Any, setting: Setting) -> list[Row]:
    """Every variant and config that is right; ours in the order in which it would be tried."""
    bench = Bench(LINEAR, label, problem, setting)
    inputs = bench.sets[0]
    before = None if inputs.residual is None else inputs.residual.clone()
    for row, variant, call in bench.ways(LINEAR.every):
        residual = None if before is None else before.clone()  # which may be written over
        first = inputs._replace(residual=residual, out=residual if problem.in_place else None)
        flops = operations(problem)
        bench.verify(row, given_inputs(variant.run, call), first=first, flops=flops)
    return bench.rows


TABLES = {
    "group_norm": Benchmark(
        NORM_COLUMNS,
        ByProblem(
            _group_norms,
            lambda problem: BYTES_BESIDE + problem.image_bytes,
            _measured_group_norm,
        ),
        NORM_TEXT.under,
    ),
    "layer_norm": Benchmark(
        NORM_COLUMNS,
        ByProblem(
            partial(of_dtype, layer_norm_problem),
            lambda problem: BYTES_BESIDE + problem.tensor_bytes,
            _measured_layer_norm,
        ),
        NORM_TEXT.under,
    ),
    "linear": Benchmark(
        Columns(f"{JSON} tflops"),
        ByProblem(
            partial(of_dtype, linear_problem),
            lambda problem: PRODUCTS_BESIDE + operations(problem),
            _measured_linear,
        ),
        _LINEAR_TEXT.under,
    ),
}
