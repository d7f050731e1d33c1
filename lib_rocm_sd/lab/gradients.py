"""`bench norm_gradients` and `bench attention_backward`: forward and backward, as in training.

A row of a norm is what autograd runs: the norm, then its gradients, of gamma and beta only where
the problem wants them. Bytes are those that must be moved: forward a tensor is read and another
written, backward it and a gradient are read and another is written; twice and five thirds as much
where a tensor is added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch user knows

import lib_rocm_sd.torch_ops  # noqa: F401 - registers our operators
from lib_rocm_sd.lab.benchmark import Benchmark, Setting
from lib_rocm_sd.lab.rows import (
    OURS,
    Column,
    Columns,
    Row,
    TextTable,
    between,
    field,
    figure,
    tiles,
)
from lib_rocm_sd.lab.tables import (
    BYTES_BESIDE,
    ERROR,
    JSON,
    NORM_COLUMNS,
    NORM_TEXT,
    US,
    Bench,
    ByProblem,
    Problems,
    given_inputs,
    in_dtype,
    odd,
    of_dtype,
)
from lib_rocm_sd.lab.timing import timed_on_a_queue, timed_with_a_full_queue
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.libraries import BACKENDS, SdpaBackend
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention.torch import SdpaAttention
from lib_rocm_sd.ops.attention.with_lse import MatrixForward
from lib_rocm_sd.ops.attention_backward import problem as attention_backward_problem
from lib_rocm_sd.ops.attention_backward.inputs import AttentionBackwardInputs, Grads
from lib_rocm_sd.ops.attention_backward.op import ATTENTION_BACKWARD
from lib_rocm_sd.ops.attention_backward.ours import MatrixBackward
from lib_rocm_sd.ops.attention_backward.torch import SlicedBackward
from lib_rocm_sd.ops.base import Call, Op, Variant
from lib_rocm_sd.ops.group_norm_backward.inputs import GroupNormBackwardInputs
from lib_rocm_sd.ops.group_norm_backward.op import GROUP_NORM_BACKWARD
from lib_rocm_sd.ops.group_norm_backward.problem import GroupNormBackwardProblem
from lib_rocm_sd.ops.layer_norm_backward.op import LAYER_NORM_BACKWARD

ATTENTION_BESIDE = 1e11
"""What attention takes beside its operations: for the estimate of the time left."""
FLASH = "sdpa flash"
ALLOWANCE = 2.0
"""Times the op's tolerance that torch's gradients of attention may be off: some round more."""


# -- norms forward and backward -------------------------------------------------------------------


def op_of(problem: Any) -> Op[Any, Any]:
    """The op that a problem of a norm's gradients belongs to."""
    is_group = isinstance(problem, GroupNormBackwardProblem)
    return GROUP_NORM_BACKWARD if is_group else LAYER_NORM_BACKWARD


def _norm_gradients(small: bool, dtype: str) -> Problems:
    """The usual problems of both norms, GroupNorms also with frozen parameters; or the odd ones."""
    ops = (LAYER_NORM_BACKWARD, GROUP_NORM_BACKWARD)
    if small:
        return odd([problem for op in ops for problem in op.cases])
    problems: Problems = []
    for op in ops:
        for label, problem in op.usual:
            problems.append((label, in_dtype(problem, dtype)))
            if op is GROUP_NORM_BACKWARD:
                problems.append((f"{label}, frozen", replace(problems[-1][1], wanted=False)))
    return problems


def _norm_size(problem: Any) -> int:
    is_group = isinstance(problem, GroupNormBackwardProblem)
    return int(problem.image_bytes if is_group else problem.tensor_bytes)


@torch.no_grad()
def _measured_norm_gradients(label: str, problem: Any, setting: Setting) -> list[Row]:
    """A copy; torch's and our forward and backward pass; our backward pass alone."""
    op, size = op_of(problem), _norm_size(problem)
    both, backward = (9 * size, 5 * size) if getattr(problem, "added", 0) else (5 * size, 3 * size)
    bench = Bench(op, label, problem, setting, timed_with_a_full_queue)
    bench.copy(size)
    bench.verify(replace(bench.start, way="torch"), passes(torchs), moved_bytes=both)
    for row, ours, call in bench.ways(op.variants[:1]):
        row = replace(row, config=None)
        bench.verify(row, passes(operators), moved_bytes=both)
        alone = given_inputs(ours.run, call)
        bench.verify(replace(row, way="  backward"), alone, moved_bytes=backward)
    return bench.beside_copy()


def passes(results: Callable[[Any, Sequence[Any]], Any]) -> Callable[[Any], Any]:
    """Forward and backward of an op's inputs: the gradients that are wanted. What autograd runs:
    the norm, then its gradients, of gamma and beta only where the problem wants them.
    """

    def call(inputs: Any) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            x = inputs.x.detach().requires_grad_()
            affine = [
                None if t is None else t.detach().requires_grad_(inputs.affine)
                for t in _affine(inputs)
            ]
            outputs = results(inputs._replace(x=x), affine)
        grads = [inputs.grad, getattr(inputs, "sum_grad", None)][: len(outputs)]
        leaves = [x, *(t for t in affine if t is not None and inputs.affine)]
        return torch.autograd.grad(outputs, leaves, grads)

    return call


def _affine(inputs: Any) -> list[torch.Tensor | None]:
    """gamma and beta: ones and zeros where gradients of such are wanted and there are none. Of
    beta LayerNorm's gradients know nothing.
    """
    x, gamma = inputs.x, inputs.gamma
    channels = x.shape[1] if isinstance(inputs, GroupNormBackwardInputs) else x.shape[-1]
    beta = getattr(inputs, "beta", None)
    if inputs.affine:
        gamma = x.new_ones(channels) if gamma is None else gamma
        beta = torch.zeros_like(gamma) if beta is None else beta
    return [gamma, beta]


def torchs(inputs: Any, affine: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """What torch's own modules compute."""
    x = inputs.x
    if isinstance(inputs, GroupNormBackwardInputs):
        output = F.group_norm(x, inputs.groups, affine[0], affine[1], inputs.eps)
        return (F.silu(output) if inputs.silu else output,)
    total = x if inputs.added is None else x + inputs.added
    output = F.layer_norm(total, x.shape[-1:], affine[0], affine[1], inputs.eps)
    return (output,) if inputs.added is None else (output, total)


def operators(inputs: Any, affine: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """The same by our operators."""
    rocm_sd: Any = torch.ops.rocm_sd
    if isinstance(inputs, GroupNormBackwardInputs):
        return (rocm_sd.group_norm_silu(inputs.x, *affine, *inputs[4:7]),)
    if inputs.added is None:
        return (rocm_sd.layer_norm(inputs.x, *affine, inputs.eps),)
    both: tuple[torch.Tensor, ...] = rocm_sd.layer_norm_added(
        inputs.x, inputs.added, *affine, inputs.eps
    )
    return both


# -- attention forward and backward ---------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """`both(inputs)`: forward and backward. `backward(inputs)` makes what is called, again and
    again, for the backward alone.
    """

    row: Row
    both: Callable[[AttentionBackwardInputs], Grads]
    backward: Callable[[AttentionBackwardInputs], Callable[[], Any]]


@torch.no_grad()
def _measured_attention(label: str, problem: Any, setting: Setting) -> list[Row]:
    """Every way that is right; ours in the order in which configs would be tried."""
    bench = Bench(ATTENTION_BACKWARD, label, problem, setting, timed_on_a_queue, _exact_gradients)
    for way in _attention_ways(bench):

        def backward_alone(row: Row, way: Way = way) -> Row:
            alone = way.backward(bench.sets[0])
            return replace(row, backward_us=bench.timed(row, lambda _: alone()).median)

        allowance = 1.0 if way.row.way == OURS else ALLOWANCE
        flops = 3.5 * problem.flops
        bench.verify(way.row, way.both, allowance=allowance, also=backward_alone, flops=flops)
    return bench.rows


def _exact_gradients(inputs: AttentionBackwardInputs) -> Grads:
    """In float64, in slices of queries."""
    q, k, v, output, grad, lse = (t.double() for t in inputs[:6])
    wide = AttentionBackwardInputs(q, k, v, output, grad, lse, inputs.mask, inputs.scale)
    return SlicedBackward().run(Call(ATTENTION_BACKWARD.problem_of(wide), wide))


def _attention_ways(bench: Bench) -> Iterator[Way]:
    forward = MatrixForward()
    for row, ours, call in bench.ways((MatrixBackward(),), forward):
        yield _our_way(row, given_inputs(ours.run, call), forward, bench)
    for row, variant, _ in bench.ways((SdpaAttention(), *map(SdpaBackend, BACKENDS))):
        yield from torchs_ways(row, partial(_followed, variant, bench.problem))


def _our_way(
    row: Row,
    backward: Callable[[AttentionBackwardInputs], Grads],
    forward: MatrixForward,
    bench: Bench,
) -> Way:
    problem, setting = bench.problem, bench.setting
    tiling = forward.configs(setting.info.arch, problem)[0]

    def both(inputs: AttentionBackwardInputs) -> Grads:
        output, lse = forward.run(Call(problem, inputs.forward, setting.launch, tiling))
        return backward(inputs._replace(output=output, lse=lse))

    return Way(row, both, lambda inputs: partial(backward, inputs))


def torchs_ways(row: Row, followed: Callable[..., Any]) -> Iterator[Way]:
    """Flash adds the gradient of q by atomics unless it is told not to, as ours never does."""

    def both(inputs: AttentionBackwardInputs) -> Grads:
        tensors, output = followed(inputs)
        of_q, of_k, of_v = torch.autograd.grad(output, tensors, inputs.grad)
        return of_q, of_k, of_v

    def backward(inputs: AttentionBackwardInputs) -> Callable[[], Any]:
        tensors, output = followed(inputs)
        return lambda: torch.autograd.grad(output, tensors, inputs.grad, retain_graph=True)

    yield Way(row, both, backward)
    if row.way == FLASH:
        yield Way(
            replace(row, way=f"{FLASH}, same bits"),
            partial(_deterministic, both),
            lambda inputs: partial(_deterministic, backward(inputs)),
        )


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
    variant: Variant[Any, Any], problem: AttentionProblem, inputs: AttentionBackwardInputs
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k and v from which autograd follows, and the output."""
    q, k, v = (t.detach().requires_grad_() for t in inputs[:3])
    with torch.enable_grad():
        call = AttentionInputs(q, k, v, inputs.mask, inputs.scale)
        return [q, k, v], variant.run(Call(problem, call))


def _rendered_attention(heading: str, rows: Sequence[Row]) -> str:
    """A table per case. `ours/it`: how long ours takes of its time, both passes."""
    lines = [heading, "us: forward and backward; TFLOP/s: of seven products"]
    for case, problem in dict.fromkeys((row.case, row.problem) for row in rows):
        group = [row for row in rows if (row.case, row.problem) == (case, problem)]
        ours_us = min((row.median for row in group if row.way == OURS), default=math.nan)

        def share(row: Row, ours_us: float = ours_us) -> str:
            return figure(ours_us / row.median)

        table = TextTable(
            (field("way", -22, "way"),),
            (
                *(US, between(17), field("backward", 9, "backward_us", ".1f")),
                Column("ours/it", 7, share),
                *(field("TFLOP/s", 7, "tflops", ".1f"), ERROR),
            ),
            tiles,
            indent="  ",
        )
        lines += ["", f"{case}: {problem}", *table.lines(group)]
    return "\n".join(lines)


TABLES = {
    "attention_backward": Benchmark(
        Columns(f"{JSON} backward_us tflops"),
        ByProblem(
            partial(of_dtype, attention_backward_problem),
            lambda problem: ATTENTION_BESIDE + 4 * problem.flops,
            _measured_attention,
        ),
        _rendered_attention,
    ),
    "norm_gradients": Benchmark(
        NORM_COLUMNS,
        ByProblem(
            _norm_gradients,
            lambda problem: BYTES_BESIDE + _norm_size(problem),
            _measured_norm_gradients,
        ),
        NORM_TEXT.under,
    ),
}
