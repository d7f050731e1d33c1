"""Linear layers as the engine, the tests, the benchmark and the tuner see them."""

from __future__ import annotations

from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.linear import inputs as linear_inputs
from lib_rocm_sd.ops.linear import problem as problems
from lib_rocm_sd.ops.linear.formula import reference
from lib_rocm_sd.ops.linear.inputs import LinearInputs
from lib_rocm_sd.ops.linear.library import LibraryLinear
from lib_rocm_sd.ops.linear.ours import MatrixLinear
from lib_rocm_sd.ops.linear.problem import ODD, USUAL, LinearProblem
from lib_rocm_sd.ops.linear.torch import TorchLinear
from lib_rocm_sd.ops.linear.trial import trial_inputs
from lib_rocm_sd.ops.linear.tunable import TunedLinear

LINEAR: Op[LinearProblem, LinearInputs] = Op(
    name="linear",
    family="linear",
    title="Linear layer",
    variants=(MatrixLinear(), LibraryLinear(), TorchLinear()),
    problem_of=linear_inputs.problem_of,
    key_of=linear_inputs.key_of,
    reference=reference,
    make_inputs=linear_inputs.make_inputs,
    tolerance=problems.tolerance,
    output_shape=problems.output_shape,
    test_problems=problems.test_problems,
    cases=(*(problem for _, problem in USUAL), *ODD),
    usual=USUAL,
    measured_as=problems.measured_as,
    trial_inputs=trial_inputs,
    measured_only=(TunedLinear(),),
)
OPS = (LINEAR,)
