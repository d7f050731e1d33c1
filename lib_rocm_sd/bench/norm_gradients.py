"""Both norms forward and backward, as in training: torch's, our operators; our gradients alone.

A row is what autograd runs: the norm, then its gradients, of gamma and beta only where the problem
wants them. Bytes are those that must be moved: forward a tensor is read and another written,
backward it and a gradient are read and another is written; twice and five thirds as much where a
tensor is added. A copy reads one and writes one. `of_copy` is the time over what
these bytes take at the copy's speed. Times are those of the GPU, with a full queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch user knows

from lib_rocm_sd import torch_ops
from lib_rocm_sd.bench.norms import (
    BYTES_BESIDE,
    NormRow,
    beside,
    timed_row,
    timed_with_a_full_queue,
    verified,
)
from lib_rocm_sd.bench.norms import render as render
from lib_rocm_sd.bench.rows import refusals_of
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.engine.measure import input_sets
from lib_rocm_sd.ops.base import Call, Launch, Op
from lib_rocm_sd.ops.group_norm_backward.inputs import GroupNormBackwardInputs
from lib_rocm_sd.ops.group_norm_backward.op import GROUP_NORM_BACKWARD
from lib_rocm_sd.ops.group_norm_backward.problem import GroupNormBackwardProblem
from lib_rocm_sd.ops.layer_norm_backward.inputs import LayerNormBackwardInputs
from lib_rocm_sd.ops.layer_norm_backward.op import LAYER_NORM_BACKWARD
from lib_rocm_sd.ops.layer_norm_backward.problem import LayerNormBackwardProblem

Problem = LayerNormBackwardProblem | GroupNormBackwardProblem
Results = tuple[torch.Tensor, ...]
OPERATORS = torch_ops.OPS
"""Registered by the import."""


def op_of(problem: Problem) -> Op[Any, Any]:
    """The op that a problem belongs to."""
    is_group = isinstance(problem, GroupNormBackwardProblem)
    return GROUP_NORM_BACKWARD if is_group else LAYER_NORM_BACKWARD


def problems(small: bool, dtype: str) -> list[tuple[str, Problem]]:
    """The usual problems of both norms, GroupNorms also with frozen parameters; or the odd ones."""
    ops = (LAYER_NORM_BACKWARD, GROUP_NORM_BACKWARD)
    if small:
        odd = [problem for op in ops for problem in op.cases]
        return [(f"odd {number}", problem) for number, problem in enumerate(odd, 1)]
    found: list[tuple[str, Problem]] = []
    for op in ops:
        for label, problem in op.usual:
            found.append((label, replace(problem, dtype=dtype, affine=dtype)))
            if op is GROUP_NORM_BACKWARD:
                found.append((f"{label}, frozen", replace(found[-1][1], wanted=False)))
    return found


def work(problem: Problem) -> float:
    """About what measuring it takes depends on."""
    return BYTES_BESIDE + _size(problem)


def _size(problem: Problem) -> int:
    if isinstance(problem, GroupNormBackwardProblem):
        return problem.image_bytes
    return problem.tensor_bytes


def measure(
    label: str,
    problem: Problem,
    device: torch.device,
    info: DeviceInfo,
    launch: Launch | None,
    runs: int,
) -> list[NormRow]:
    """A copy; torch's and our forward and backward pass; our backward pass alone."""
    op, size, timer = op_of(problem), _size(problem), timed_with_a_full_queue
    with torch.no_grad():
        sets = input_sets(op, problem, device)
        exact = tuple(t for t in op.reference(sets[0]) if t is not None)
        start = NormRow(label, str(problem), "copy")
        copied = torch.empty_like(sets[0].x)
        copy = timed_row(start, sets, lambda _, x, *__: copied.copy_(x), 2 * size, runs, timer)
        ours = op.variants[0]
        refusals = refusals_of(ours, problem, info, launch)
        both, alone_moved = (9, 5) if _is_added(problem) else (5, 3)
        rows = [copy]
        for by, results in (("torch", torchs), ("rocm_sd", operators)):
            row = replace(start, way=by)
            if by == "rocm_sd" and refusals:
                rows.append(replace(row, reason="; ".join(refusals)))
                continue
            call = _passes(op, results)
            rows.append(verified(op, row, sets, call, exact, both * size, runs, timer))
        if not refusals:
            (config,) = ours.configs(info.arch, problem)

            def alone(*given: Any) -> Results:
                made = ours.run(Call(problem, type(sets[0])(*given), launch, config))
                return tuple(t for t in made if t is not None)

            row = replace(start, way="  backward")
            rows.append(verified(op, row, sets, alone, exact, alone_moved * size, runs, timer))
    return [beside(row, copy) for row in rows]


def _is_added(problem: Problem) -> bool:
    """Whether a tensor is added before the norm."""
    return isinstance(problem, LayerNormBackwardProblem) and problem.added


def _passes(op: Op[Any, Any], results: Callable[[Any, Sequence[Any]], Results]) -> Any:
    """Forward and backward, given an op's inputs one by one: the gradients that are wanted."""

    def call(*given: Any) -> Results:
        inputs = (
            GroupNormBackwardInputs(*given)
            if op is GROUP_NORM_BACKWARD
            else LayerNormBackwardInputs(*given)
        )
        with torch.enable_grad():
            x = inputs.x.detach().requires_grad_()
            affine = [
                None if t is None else t.detach().requires_grad_(inputs.affine)
                for t in _affine(inputs)
            ]
            made = results(inputs._replace(x=x), affine)
        grads = [inputs.grad, getattr(inputs, "sum_grad", None)][: len(made)]
        wanted = [x, *(t for t in affine if t is not None and inputs.affine)]
        return torch.autograd.grad(made, wanted, grads)

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


def torchs(inputs: Any, affine: Sequence[Any]) -> Results:
    """What torch's own modules compute."""
    x = inputs.x
    if isinstance(inputs, GroupNormBackwardInputs):
        made = F.group_norm(x, inputs.groups, affine[0], affine[1], inputs.eps)
        return (F.silu(made) if inputs.silu else made,)
    total = x if inputs.added is None else x + inputs.added
    made = F.layer_norm(total, x.shape[-1:], affine[0], affine[1], inputs.eps)
    return (made,) if inputs.added is None else (made, total)


def operators(inputs: Any, affine: Sequence[Any]) -> Results:
    """The same by our operators."""
    rocm_sd: Any = torch.ops.rocm_sd
    if isinstance(inputs, GroupNormBackwardInputs):
        return (rocm_sd.group_norm_silu(inputs.x, *affine, *inputs[4:7]),)
    if inputs.added is None:
        return (rocm_sd.layer_norm(inputs.x, *affine, inputs.eps),)
    made: Results = rocm_sd.layer_norm_added(inputs.x, inputs.added, *affine, inputs.eps)
    return made
