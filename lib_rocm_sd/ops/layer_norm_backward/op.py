"""The gradients of LayerNorm as the engine, the tests and the benchmark see them."""

from __future__ import annotations

from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.gradients import empty_gradients, gradient_tolerance
from lib_rocm_sd.ops.keys import key_of
from lib_rocm_sd.ops.layer_norm_backward import formula
from lib_rocm_sd.ops.layer_norm_backward import inputs as layer_norm_backward_inputs
from lib_rocm_sd.ops.layer_norm_backward import problem as problems
from lib_rocm_sd.ops.layer_norm_backward.inputs import LayerNormBackwardInputs
from lib_rocm_sd.ops.layer_norm_backward.ours import KernelLayerNormBackward
from lib_rocm_sd.ops.layer_norm_backward.problem import LayerNormBackwardProblem
from lib_rocm_sd.ops.layer_norm_backward.torch import TorchLayerNormBackward

LAYER_NORM_BACKWARD: Op[LayerNormBackwardProblem, LayerNormBackwardInputs] = Op(
    name="layer norm backward",
    family="layer_norm_backward",
    title="Layer norm, gradients",
    variants=(KernelLayerNormBackward(), TorchLayerNormBackward()),
    problem_of=layer_norm_backward_inputs.problem_of,
    key_of=key_of,
    reference=lambda inputs: formula.reference(*inputs),
    make_inputs=layer_norm_backward_inputs.make_inputs,
    tolerance=gradient_tolerance,
    output_shape=lambda p: p.shape,
    test_problems=problems.test_problems,
    cases=problems.ODD,
    usual=problems.USUAL,
    results=lambda problem, inputs: empty_gradients(problem, inputs.x.new_empty(problem.shape)),
    trial_inputs=layer_norm_backward_inputs.trial_inputs,
)
OPS = (LAYER_NORM_BACKWARD,)
