"""`python -m lib_rocm_sd bench linear` on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd import __main__
from lib_rocm_sd.lab import tables
from lib_rocm_sd.lab.benchmark import Setting
from lib_rocm_sd.lab.tables import TABLES
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.problem import LinearProblem
from tests.ops.toy_op import CPU, GFX1100
from tests.verify import simt
from tests.verify.simt.launch import ShimLaunch

TABLE: Any = TABLES["linear"]
PROBLEM = LinearProblem(5, 40, (24,), residual=True, in_place=True)


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    command = ["bench", "linear", "--small", "--runs", "2", "--device", "cpu"]
    assert __main__.main([*command, "--json", str(file)]) == 0
    assert "rocm_sd         not run: no supported GPU" in capsys.readouterr().out
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    figures = [row for row in rows if not row["reason"]]
    assert {row["way"] for row in figures} == {"torch"}
    assert all(row["median_us"] > 0 and row["tflops"] > 0 for row in figures)


def test_the_layers_are_those_of_the_op() -> None:
    usual = TABLE.rows.problems(False, "bfloat16")
    assert [label for label, _ in usual] == [label for label, _ in LINEAR.usual]
    assert {problem.dtype for _, problem in usual} == {"bfloat16"}
    assert tables.operations(LinearProblem(2, 8, (16,), gate=True)) == 2 * 2 * 8 * 32


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = LINEAR.variants[0]
    monkeypatch.setattr(type(ours), "run", lambda self, call: torch.zeros(5, 24))
    rows = TABLE.rows.measure("odd", PROBLEM, Setting(CPU, GFX1100, lambda *a, **k: None, 1))
    found = [row for row in rows if row.way == "rocm_sd"]
    assert len(found) >= 4 and all(row.reason == "wrong: error 1.0e+00" for row in found)


@pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))
def test_ours_and_torchs_are_timed_although_the_residual_is_written_over() -> None:
    assert GFX1100.arch is not None
    launch = ShimLaunch(GFX1100.arch)
    with launch.knows():
        rows = TABLE.rows.measure("odd", PROBLEM, Setting(CPU, GFX1100, launch, 1))
    *rows, tunable = rows
    assert (tunable.way, tunable.reason) == ("torch tunable", "no supported GPU")
    assert {row.way for row in rows} == {"rocm_sd", "torch + rocm_sd", "torch"}
    told = {row.reason for row in rows if row.way == "torch + rocm_sd"}
    assert told == {"there is no gate (GEGLU), which it is for"}
    timed = [row for row in rows if row.way != "torch + rocm_sd"]
    assert all(row.reason == "" and row.tflops > 0 for row in timed)
    assert "torch" in TABLE.render("heading", rows)
