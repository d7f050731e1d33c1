"""`python -m lib_rocm_sd bench group_norm` on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib_rocm_sd.lab.benchmark import Setting
from lib_rocm_sd.lab.tables import TABLES
from lib_rocm_sd.ops.group_norm.op import GROUP_NORM_SILU
from lib_rocm_sd.ops.group_norm.problem import GroupNormProblem
from tests.ops.toy_op import CPU, GFX1100
from tests.verify import simt
from tests.verify.simt.launch import ShimLaunch

TABLE: Any = TABLES["group_norm"]
PROBLEM = GroupNormProblem(1, 16, 3, 5, "float16", True, True, 4)


def test_the_usual_problems_come_in_both_memory_formats() -> None:
    usual = TABLE.rows.problems(False, "bfloat16")
    assert len({problem for _, problem in usual}) == len(usual) == 2 * len(GROUP_NORM_SILU.usual)
    assert {problem.dtype for _, problem in usual} == {"bfloat16"}


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = GROUP_NORM_SILU.variants[0]
    monkeypatch.setattr(type(ours), "run", lambda self, call: torch.zeros_like(call.inputs.x))
    rows = TABLE.rows.measure("odd", PROBLEM, Setting(CPU, GFX1100, lambda *a, **k: None, 1))
    found = [row for row in rows if row.way == "rocm_sd"]
    assert len(found) == 4 and all(row.reason == "wrong: error 1.0e+00" for row in found)


@pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))
def test_ours_and_its_steps_are_timed() -> None:
    assert GFX1100.arch is not None
    launch = ShimLaunch(GFX1100.arch)
    with launch.knows():
        rows = TABLE.rows.measure("odd", PROBLEM, Setting(CPU, GFX1100, launch, 1))
    ways = [row.way.strip() for row in rows]
    assert ways == [
        "copy",
        "rocm_sd",
        "rocm_sd",
        "statistics",
        "finalize",
        "apply",
        "rocm_sd",
        "rocm_sd",
        "torch",
        "triton",
    ]
    assert rows.pop().reason == "no supported GPU"
    assert all(row.reason == "" and row.gigabytes_per_s > 0 for row in rows)
    assert "finalize" in TABLE.render("heading", rows)
