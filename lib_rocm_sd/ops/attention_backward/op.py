"""The backward of attention as the engine, the tests and the benchmark see it."""

from __future__ import annotations

from lib_rocm_sd.ops.attention import problem as forward
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention_backward import inputs as attention_backward_inputs
from lib_rocm_sd.ops.attention_backward import problem as problems
from lib_rocm_sd.ops.attention_backward.formula import reference
from lib_rocm_sd.ops.attention_backward.inputs import AttentionBackwardInputs
from lib_rocm_sd.ops.attention_backward.ours import MatrixBackward
from lib_rocm_sd.ops.attention_backward.torch import (
    FormulaBackward,
    SdpaBackward,
    SlicedBackward,
)
from lib_rocm_sd.ops.attention_backward.trial import trial_inputs
from lib_rocm_sd.ops.base import Op

ATTENTION_BACKWARD: Op[AttentionProblem, AttentionBackwardInputs] = Op(
    name="attention backward",
    family="attention_backward",
    title="Attention, backward",
    variants=(MatrixBackward(), FormulaBackward(), SdpaBackward(), SlicedBackward()),
    problem_of=attention_backward_inputs.problem_of,
    key_of=attention_backward_inputs.key_of,
    reference=reference,
    make_inputs=attention_backward_inputs.make_inputs,
    tolerance=problems.tolerance,
    output_shape=lambda p: (p.batch, p.seq_q, p.heads, p.head_dim),
    test_problems=problems.test_problems,
    cases=(*(problem for _, problem in problems.USUAL), *problems.ODD),
    usual=problems.USUAL,
    measured_as=forward.measured_as,
    trial_inputs=trial_inputs,
)
OPS = (ATTENTION_BACKWARD,)
