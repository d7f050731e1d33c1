"""Operators called over the ops' own small cases."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.conv.kernel import KINDS
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.linear.problem import FEW_WEIGHTS, LinearProblem
from lib_rocm_sd.ops.registry import ops
from lib_rocm_sd.torch_ops.table import DOORS

CPU = torch.device("cpu")
MOST_VALUES, MOST_WEIGHTS = 20_000, 300_000
"""Of an output and of a linear layer in a small case."""
CONV = ConvProblem("3x3", 2, 5, 6, 16, 20, in_rows=True)
CONV_CASES = (
    *(replace(CONV, kind=kind) for kind in KINDS),
    replace(CONV, in_channels=4, dtype="bfloat16", embedding=True),
    replace(CONV, norm=True, statistics=True, embedding=True),
    replace(CONV, norm=True, shortcut="identity", shortcut_channels=24, out_channels=24),
    replace(CONV, shortcut="conv", shortcut_channels=8, statistics=True, dtype="float32"),
)
"""Convolutions of weights as they lie; the ops' own cases are a VAE's, whole."""


class _Recorder(TorchDispatchMode):
    """Keeps the calls of our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "rocm_sd":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def small_cases() -> Iterator[tuple[Op[Any, Any], Any]]:
    """Ops with small problems of theirs."""
    for op in ops():
        if op.name in DOORS:
            for problem in op.cases if op.family != "conv" else ():
                weights = problem.k * problem.weight_rows if op.family == "linear" else 0
                made = math.prod(op.output_shape(problem))
                if 0 < made <= MOST_VALUES and weights <= MOST_WEIGHTS and _is_one_call(problem):
                    yield op, problem
    for problem in CONV_CASES:
        yield CONVS[problem.kind], problem


def _is_one_call(problem: Any) -> bool:
    """Linear layers of many weights are several."""
    return not isinstance(problem, LinearProblem) or len(problem.columns) <= FEW_WEIGHTS


def every_case() -> Iterator[tuple[Op[Any, Any], Any]]:
    """Ops with all problems that tests, benchmarks and the tuner have of them."""
    for op in ops():
        if op.name in DOORS:
            listed = dict.fromkeys((*op.cases, *(problem for _, problem in op.usual)))
            for problem in filter(_is_one_call, listed):
                lies = {"in_rows": True} if op.family == "conv" else {}
                yield op, replace(problem, **lies)
    for problem in CONV_CASES:
        yield CONVS[problem.kind], problem


def call_of(
    op: Op[Any, Any], problem: Any, seed: int = 0, device: torch.device = CPU
) -> tuple[Any, tuple[Any, ...], Any]:
    """The operator and arguments that the op's random inputs come to, and these inputs."""
    inputs = op.make_inputs(problem, device, seed)
    if getattr(inputs, "out", None) is not None:  # written over after the operator
        inputs = inputs._replace(out=None)
    with _Recorder() as recorder, torch.no_grad():
        DOORS[op.name](inputs)
    ((operator, arguments),) = recorder.calls
    return operator, arguments, inputs


def tensors(made: Any) -> list[torch.Tensor]:
    """What an operator gives, one or several; not the empty ones that stand for gradients which are
    not wanted.
    """
    every = [made] if isinstance(made, torch.Tensor) else made
    return [item for item in every if item is not None and item.shape != (0,)]
