"""`python -m lib_rocm_sd bench layer_norm` on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib_rocm_sd.lab.benchmark import Setting
from lib_rocm_sd.lab.tables import TABLES
from lib_rocm_sd.ops.layer_norm import kernel
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from tests.ops.toy_op import CPU, GFX1100
from tests.verify import simt
from tests.verify.simt.launch import ShimLaunch

TABLE: Any = TABLES["layer_norm"]
PROBLEM = LayerNormProblem((3, 5, 40), added=True)


def test_the_usual_problems_come_in_the_dtype_that_is_asked_for() -> None:
    usual = TABLE.rows.problems(False, "bfloat16")
    assert len({problem for _, problem in usual}) == len(usual) == len(LAYER_NORM.usual)
    assert {problem.dtype for _, problem in usual} == {"bfloat16"}
    assert {problem.affine for _, problem in usual} == {"bfloat16", "none"}


def test_bytes_are_those_that_must_be_moved() -> None:
    for added, times in ((False, 1), (True, 2)):
        problem = LayerNormProblem((3, 5, 40), added=added)
        rows = TABLE.rows.measure("odd", problem, Setting(CPU, GFX1100, None, 3))
        copy, *_, torchs = rows
        bytes_of = [row.gigabytes_per_s * row.median for row in (copy, torchs)]
        assert bytes_of[1] == pytest.approx(times * bytes_of[0])
        assert torchs.of_copy == pytest.approx(torchs.median / copy.median / times)


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = LAYER_NORM.variants[0]
    monkeypatch.setattr(
        *(type(ours), "run"),
        lambda self, call: (torch.zeros_like(call.inputs.x), call.inputs.x + call.inputs.added),
    )
    rows = TABLE.rows.measure("odd", PROBLEM, Setting(CPU, GFX1100, lambda *a, **k: None, 1))
    found = [row for row in rows if row.way == "rocm_sd"]
    assert len(found) == len(kernel.CONFIGS)
    assert all(row.reason == "wrong: error 1.0e+00" for row in found)


@pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))
def test_ours_is_timed() -> None:
    assert GFX1100.arch is not None
    launch = ShimLaunch(GFX1100.arch)
    with launch.knows():
        rows = TABLE.rows.measure("odd", PROBLEM, Setting(CPU, GFX1100, launch, 1))
    assert [row.way for row in rows] == ["copy", *["rocm_sd"] * len(kernel.CONFIGS), "torch"]
    assert all(row.reason == "" and row.gigabytes_per_s > 0 for row in rows)
    assert "threads=128" in TABLE.render("heading", rows)
