"""LayerNorm as the engine, the tests, the benchmark and the tuner see it."""

from __future__ import annotations

from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.layer_norm import formula
from lib_rocm_sd.ops.layer_norm import problem as problems
from lib_rocm_sd.ops.layer_norm.ours import KernelLayerNorm
from lib_rocm_sd.ops.layer_norm.problem import LayerNormInputs, LayerNormProblem
from lib_rocm_sd.ops.layer_norm.torch import TorchLayerNorm
from lib_rocm_sd.ops.layer_norm.trial import trial_inputs

LAYER_NORM: Op[LayerNormProblem, LayerNormInputs] = Op(
    name="layer norm",
    family="layer_norm",
    title="Layer norm",
    variants=(KernelLayerNorm(), TorchLayerNorm()),
    problem_of=problems.problem_of,
    key_of=problems.key_of,
    reference=lambda inputs: formula.reference(*inputs),
    make_inputs=problems.make_inputs,
    tolerance=problems.tolerance,
    output_shape=lambda p: p.shape,
    test_problems=problems.test_problems,
    cases=(*(problem for _, problem in problems.USUAL), *problems.ODD),
    usual=problems.USUAL,
    measured_as=problems.measured_as,
    trial_inputs=trial_inputs,
)
OPS = (LAYER_NORM,)
