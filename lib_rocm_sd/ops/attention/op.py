"""Attention, also for a backward pass, as the engine, tests, benchmark and tuner see it."""

from __future__ import annotations

from lib_rocm_sd.ops.attention import inputs as attention_inputs
from lib_rocm_sd.ops.attention import problem as problems
from lib_rocm_sd.ops.attention import with_lse
from lib_rocm_sd.ops.attention.backends import BACKENDS, SdpaBackend
from lib_rocm_sd.ops.attention.by_triton import TritonAttention
from lib_rocm_sd.ops.attention.formula import reference
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.libraries import LIBRARIES
from lib_rocm_sd.ops.attention.ours import MatrixAttention
from lib_rocm_sd.ops.attention.problem import CASES, ODD, USUAL, AttentionProblem
from lib_rocm_sd.ops.attention.scores import ScoresAttention
from lib_rocm_sd.ops.attention.torch import SdpaAttention, SlicedAttention
from lib_rocm_sd.ops.attention.trial import trial_inputs
from lib_rocm_sd.ops.base import Op

ATTENTION: Op[AttentionProblem, AttentionInputs] = Op(
    name="attention",
    family="attention",
    title="Attention",
    variants=(MatrixAttention(), ScoresAttention(), SdpaAttention(), SlicedAttention()),
    problem_of=attention_inputs.problem_of,
    key_of=attention_inputs.key_of,
    reference=reference,
    make_inputs=attention_inputs.make_inputs,
    tolerance=problems.tolerance,
    output_shape=problems.output_shape,
    test_problems=problems.test_problems,
    cases=(*(case.problem for case in CASES), *ODD),
    usual=USUAL,
    measured_as=problems.measured_as,
    trial_inputs=trial_inputs,
    measured_only=(*map(SdpaBackend, BACKENDS), *LIBRARIES, TritonAttention()),
)
ATTENTION_AND_LSE: Op[AttentionProblem, AttentionInputs] = Op(
    name="attention and lse",
    family="attention",
    title="Attention, to be followed by its gradients",
    variants=with_lse.VARIANTS,
    problem_of=attention_inputs.problem_of,
    key_of=attention_inputs.key_of,
    reference=with_lse.reference,
    make_inputs=attention_inputs.make_inputs,
    tolerance=problems.tolerance,
    output_shape=problems.output_shape,
    test_problems=problems.test_problems,
    cases=ATTENTION.cases,
    usual=USUAL,
    measured_as=problems.measured_as,
    trial_inputs=trial_inputs,
)
OPS = (ATTENTION, ATTENTION_AND_LSE)
