"""The convolutions as the engine, the tests, the benchmark and the tuner see them."""

from __future__ import annotations

from functools import partial

from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.conv import formula
from lib_rocm_sd.ops.conv import inputs as conv_inputs
from lib_rocm_sd.ops.conv import problem as problems
from lib_rocm_sd.ops.conv.inputs import ConvInputs
from lib_rocm_sd.ops.conv.kernel import KINDS
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.conv.torch import LibraryConv, PlanarConv, TorchConv
from lib_rocm_sd.ops.conv.trial import trial_inputs


def _op(kind: str) -> Op[ConvProblem, ConvInputs]:
    return Op(
        name=f"conv {kind}",
        family="conv",
        title="Convolution",
        variants=(MatrixConv(kind), LibraryConv(kind), PlanarConv(kind), TorchConv(kind)),
        problem_of=partial(conv_inputs.problem_of, kind),
        key_of=conv_inputs.key_of,
        reference=partial(formula.reference, kind),
        make_inputs=conv_inputs.make_inputs,
        tolerance=problems.tolerance,
        output_shape=problems.output_shape,
        test_problems=problems.test_problems,
        cases=tuple(problem for _, problem in problems.usual(kind)),
        usual=problems.usual(kind),
        measured_as=problems.measured_as,
        trial_inputs=trial_inputs,
    )


CONVS: dict[str, Op[ConvProblem, ConvInputs]] = {kind: _op(kind) for kind in KINDS}
OPS = tuple(CONVS.values())
