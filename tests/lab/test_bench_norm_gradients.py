"""`python -m lib_rocm_sd bench norm_gradients` on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib_rocm_sd.lab import gradients
from lib_rocm_sd.lab.benchmark import Setting
from lib_rocm_sd.lab.gradients import TABLES
from lib_rocm_sd.ops.group_norm_backward.problem import GroupNormBackwardProblem
from lib_rocm_sd.ops.layer_norm_backward.problem import LayerNormBackwardProblem
from tests.ops.toy_op import CPU, GFX1100
from tests.verify import simt
from tests.verify.simt.launch import ShimLaunch

TABLE: Any = TABLES["norm_gradients"]
ROWS = LayerNormBackwardProblem((3, 5, 40), added=True)
IMAGE = GroupNormBackwardProblem(2, 16, 5, 7, groups=4, silu=True)


def test_the_usual_problems_come_trained_and_frozen_in_the_dtype_that_is_asked_for() -> None:
    usual = TABLE.rows.problems(False, "bfloat16")
    assert len({problem for _, problem in usual}) == len(usual)
    assert {(p.dtype, p.affine) for _, p in usual} == {("bfloat16", "bfloat16")}
    for kind in (LayerNormBackwardProblem, GroupNormBackwardProblem):
        assert {p.wanted for _, p in usual if isinstance(p, kind)} == {True, False}


@pytest.mark.parametrize("problem", [ROWS, IMAGE], ids=str)
def test_our_operators_find_what_torch_finds(
    problem: LayerNormBackwardProblem | GroupNormBackwardProblem,
) -> None:
    op = gradients.op_of(problem)
    inputs = op.make_inputs(problem, CPU, 1)
    found = [
        gradients.passes(results)(inputs) for results in (gradients.operators, gradients.torchs)
    ]
    assert len(found[0]) == len(found[1]) == 3
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))
@pytest.mark.parametrize("problem", [ROWS, IMAGE], ids=str)
def test_ours_is_timed(problem: LayerNormBackwardProblem | GroupNormBackwardProblem) -> None:
    """The backward pass by the kernels; both passes by the engine, which has no GPU here."""
    assert GFX1100.arch is not None
    launch = ShimLaunch(GFX1100.arch)
    with launch.knows():
        rows = TABLE.rows.measure("odd", problem, Setting(CPU, GFX1100, launch, 1))
    assert [row.way for row in rows] == ["copy", "torch", "rocm_sd", "  backward"]
    assert all(row.reason == "" and row.gigabytes_per_s > 0 for row in rows)
    assert "  backward" in TABLE.render("heading", rows)
