"""The gradients of GroupNorm as the engine, the tests and the benchmark see them."""

from __future__ import annotations

from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.gradients import empty_gradients, gradient_tolerance
from lib_rocm_sd.ops.group_norm.inputs import empty_image
from lib_rocm_sd.ops.group_norm_backward import formula
from lib_rocm_sd.ops.group_norm_backward import inputs as group_norm_backward_inputs
from lib_rocm_sd.ops.group_norm_backward import problem as problems
from lib_rocm_sd.ops.group_norm_backward.inputs import GroupNormBackwardInputs
from lib_rocm_sd.ops.group_norm_backward.ours import KernelGroupNormBackward
from lib_rocm_sd.ops.group_norm_backward.problem import GroupNormBackwardProblem
from lib_rocm_sd.ops.group_norm_backward.torch import TorchGroupNormBackward
from lib_rocm_sd.ops.keys import key_of

GROUP_NORM_BACKWARD: Op[GroupNormBackwardProblem, GroupNormBackwardInputs] = Op(
    name="group norm backward",
    family="group_norm_backward",
    title="Group norm, gradients",
    variants=(KernelGroupNormBackward(), TorchGroupNormBackward()),
    problem_of=group_norm_backward_inputs.problem_of,
    key_of=key_of,
    reference=lambda inputs: formula.reference(*inputs),
    make_inputs=group_norm_backward_inputs.make_inputs,
    tolerance=gradient_tolerance,
    output_shape=lambda p: p.shape,
    test_problems=problems.test_problems,
    cases=problems.ODD,
    usual=problems.USUAL,
    results=lambda problem, inputs: empty_gradients(problem, empty_image(problem, inputs)),
    trial_inputs=group_norm_backward_inputs.trial_inputs,
)
OPS = (GROUP_NORM_BACKWARD,)
