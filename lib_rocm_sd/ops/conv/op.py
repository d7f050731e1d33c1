"""The convolutions as the engine, the tests, the benchmark and the tuner see them."""

from __future__ import annotations

from functools import partial
from typing import Any

from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.conv import formula
from lib_rocm_sd.ops.conv import problem as problems
from lib_rocm_sd.ops.conv.kernel import KINDS
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.conv.torch import LibraryConv, TorchConv


def _op(kind: str, suffix: str = "") -> Op[ConvProblem]:
    def problem_of(*inputs: Any) -> ConvProblem:
        x, _, norm, shortcut, weights, next_norm, _, *band_and_out = inputs
        return problems.problem_of(kind, x, weights, norm, shortcut, next_norm, *band_and_out)

    return Op(
        name=f"conv {kind}{suffix}",
        variants=(MatrixConv(kind), LibraryConv(kind), TorchConv(kind)),
        problem_of=problem_of,
        reference=partial(formula.reference, kind),
        make_inputs=problems.make_inputs,
        tolerance=problems.tolerance,
        output_shape=problems.output_shape,
        test_problems=problems.test_problems,
        cases=tuple(problem for _, problem in problems.usual(kind)),
        usual=problems.usual(kind),
        measured_as=problems.measured_as,
    )


CONVS: dict[str, Op[ConvProblem]] = {kind: _op(kind) for kind in KINDS}


_IN_PLACE = {kind: _op(kind, " in place") for kind in KINDS}
"""Ops of their own, since the engine knows a call by its tensors' shapes and not their places."""


def in_place(kind: str) -> Op[ConvProblem]:
    """The op of this kind whose output is written over the shortcut."""
    return _IN_PLACE[kind]


def op_of(problem: ConvProblem) -> Op[ConvProblem]:
    """The op that a problem is one of."""
    return (_IN_PLACE if problem.in_place else CONVS)[problem.kind]
