"""LayerNorm as the engine, the tests, the benchmark and the tuner see it."""

from __future__ import annotations

from lib_rocm_sd.ops.base import Op, norm_tolerance
from lib_rocm_sd.ops.keys import key_of
from lib_rocm_sd.ops.layer_norm import biased, formula, heads, modulated, rms
from lib_rocm_sd.ops.layer_norm import inputs as layer_norm_inputs
from lib_rocm_sd.ops.layer_norm import problem as problems
from lib_rocm_sd.ops.layer_norm.biased import BiasedInputs, BiasedProblem
from lib_rocm_sd.ops.layer_norm.heads import HeadsInputs, HeadsProblem
from lib_rocm_sd.ops.layer_norm.inputs import LayerNormInputs, trial_inputs
from lib_rocm_sd.ops.layer_norm.modulated import ModulatedInputs, ModulatedProblem
from lib_rocm_sd.ops.layer_norm.ours import KernelLayerNorm
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from lib_rocm_sd.ops.layer_norm.rms import RmsInputs, RmsProblem
from lib_rocm_sd.ops.layer_norm.torch import TorchLayerNorm

LAYER_NORM: Op[LayerNormProblem, LayerNormInputs] = Op(
    name="layer norm",
    family="layer_norm",
    title="Layer norm",
    variants=(KernelLayerNorm(), TorchLayerNorm()),
    problem_of=layer_norm_inputs.problem_of,
    key_of=key_of,
    reference=lambda inputs: formula.reference(*inputs),
    make_inputs=layer_norm_inputs.make_inputs,
    tolerance=norm_tolerance,
    output_shape=lambda p: p.shape,
    test_problems=problems.test_problems,
    cases=(*(problem for _, problem in problems.USUAL), *problems.ODD),
    usual=problems.USUAL,
    results=lambda problem, inputs: layer_norm_inputs.empty(inputs.x, problem.added),
    measured_as=problems.measured_as,
    trial_inputs=trial_inputs,
)
LAYER_NORM_BIASED: Op[BiasedProblem, BiasedInputs] = Op(
    name="layer norm biased",
    family="layer_norm",
    title="Layer norm, with biases",
    variants=(biased.KernelBiased(), biased.TorchBiased()),
    problem_of=biased.problem_of,
    key_of=key_of,
    reference=biased.reference,
    make_inputs=biased.make_inputs,
    tolerance=norm_tolerance,
    output_shape=lambda p: p.shape,
    test_problems=problems.test_problems,
    cases=(*(problem for _, problem in biased.USUAL), *biased.ODD),
    usual=biased.USUAL,
    results=lambda problem, inputs: layer_norm_inputs.empty(inputs.x, problem.keeps),
    measured_as=problems.measured_as,
    trial_inputs=biased.trial_inputs,
)
LAYER_NORM_MODULATED: Op[ModulatedProblem, ModulatedInputs] = Op(
    name="layer norm modulated",
    family="layer_norm",
    title="Layer norm, modulated",
    variants=(modulated.KernelModulated(), modulated.TorchModulated()),
    problem_of=modulated.problem_of,
    key_of=key_of,
    reference=modulated.reference,
    make_inputs=modulated.make_inputs,
    tolerance=norm_tolerance,
    output_shape=lambda p: p.shape,
    test_problems=modulated.test_problems,
    cases=(*(problem for _, problem in modulated.USUAL), *modulated.ODD),
    usual=modulated.USUAL,
    results=lambda problem, inputs: layer_norm_inputs.empty(inputs.x, problem.added),
    measured_as=modulated.measured_as,
    trial_inputs=modulated.trial_inputs,
)
RMS_NORM_HEADS: Op[HeadsProblem, HeadsInputs] = Op(
    name="rms norm of heads",
    family="layer_norm",
    title="RMSNorm of heads",
    variants=(heads.KernelHeads(), heads.TorchHeads()),
    problem_of=heads.problem_of,
    key_of=key_of,
    reference=heads.reference,
    make_inputs=heads.make_inputs,
    tolerance=norm_tolerance,
    output_shape=lambda p: p.shape,
    test_problems=heads.test_problems,
    cases=(*(problem for _, problem in heads.USUAL), *heads.ODD),
    usual=heads.USUAL,
    measured_as=heads.measured_as,
)
RMS_NORM: Op[RmsProblem, RmsInputs] = Op(
    name="rms norm",
    family="layer_norm",
    title="RMSNorm",
    variants=(rms.KernelRms(), rms.TorchRms()),
    problem_of=rms.problem_of,
    key_of=key_of,
    reference=rms.reference,
    make_inputs=rms.make_inputs,
    tolerance=norm_tolerance,
    output_shape=lambda p: p.shape,
    test_problems=problems.test_problems,
    cases=(*(problem for _, problem in rms.USUAL), *rms.ODD),
    usual=rms.USUAL,
    measured_as=problems.measured_as,
    trial_inputs=rms.trial_inputs,
)
OPS = (LAYER_NORM, LAYER_NORM_BIASED, LAYER_NORM_MODULATED, RMS_NORM_HEADS, RMS_NORM)
