"""The convolutions as the engine, the tests, the benchmark and the tuner see them."""

from __future__ import annotations

from functools import partial

from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.conv import formula
from lib_rocm_sd.ops.conv import problem as problems
from lib_rocm_sd.ops.conv.kernel import KINDS
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import ConvInputs, ConvProblem
from lib_rocm_sd.ops.conv.torch import LibraryConv, TorchConv


def _op(kind: str, suffix: str = "") -> Op[ConvProblem, ConvInputs]:
    return Op(
        name=f"conv {kind}{suffix}",
        title="Convolution",
        variants=(MatrixConv(kind), LibraryConv(kind), TorchConv(kind)),
        problem_of=partial(problems.problem_of, kind),
        key_of=partial(problems.key_of, kind),
        reference=partial(formula.reference, kind),
        make_inputs=problems.make_inputs,
        tolerance=problems.tolerance,
        output_shape=problems.output_shape,
        test_problems=problems.test_problems,
        cases=tuple(problem for _, problem in problems.usual(kind)),
        usual=problems.usual(kind),
        measured_as=problems.measured_as,
    )


CONVS: dict[str, Op[ConvProblem, ConvInputs]] = {kind: _op(kind) for kind in KINDS}


_IN_PLACE = {kind: _op(kind, " in place") for kind in KINDS}
"""Ops of their own, since the engine knows a call by its tensors' shapes and not their places."""


def in_place(kind: str) -> Op[ConvProblem, ConvInputs]:
    """The op of this kind whose output is written over the shortcut."""
    return _IN_PLACE[kind]


def op_of(problem: ConvProblem) -> Op[ConvProblem, ConvInputs]:
    """The op that a problem is one of."""
    return (_IN_PLACE if problem.in_place else CONVS)[problem.kind]
