"""`python -m lib_rocm_sd bench attention_backward` on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib_rocm_sd import __main__
from lib_rocm_sd.lab import gradients
from lib_rocm_sd.lab.benchmark import Setting
from lib_rocm_sd.lab.gradients import TABLES
from lib_rocm_sd.lab.rows import Row
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention_backward.op import ATTENTION_BACKWARD
from tests.ops.toy_op import CPU, GFX1100
from tests.verify import simt
from tests.verify.simt.launch import ShimLaunch

TABLE: Any = TABLES["attention_backward"]
PROBLEM = AttentionProblem(1, 1, 17, 15, 40)


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    command = ["bench", "attention_backward", "--small", "--runs", "1", "--device", "cpu"]
    assert __main__.main([*command, "--json", str(file)]) == 0
    assert "rocm_sd                not run: no supported GPU" in capsys.readouterr().out
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    figures = [row for row in rows if not row["reason"]]
    assert {"sdpa"} == {row["way"] for row in figures}
    assert all(row["median_us"] > 0 and row["backward_us"] > 0 for row in figures)
    assert all(row["tflops"] > 0 and row["error"] < 0.06 for row in figures)


def test_the_problems_are_those_of_the_op() -> None:
    usual = TABLE.rows.problems(False, "bfloat16")
    assert [label for label, _ in usual] == [label for label, _ in ATTENTION_BACKWARD.usual]
    assert {problem.dtype for _, problem in usual} == {"bfloat16"}


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tuple(torch.zeros(1, seq, 1, 40) for seq in (17, 15, 15))
    ours = type(ATTENTION_BACKWARD.variants[0])
    monkeypatch.setattr(ours, "run", lambda self, call: made)
    monkeypatch.setattr(
        "lib_rocm_sd.ops.attention.ours.MatrixAttention.run",
        lambda self, call: torch.zeros(1, 17, 40).half(),
    )
    rows = TABLE.rows.measure("odd", PROBLEM, Setting(CPU, GFX1100, lambda *a, **k: None, 1))
    (row,) = [row for row in rows if row.way == "rocm_sd"]
    assert row.reason == "wrong: error 1.0e+00"


@pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))
def test_ours_is_timed_beside_torchs() -> None:
    assert GFX1100.arch is not None
    launch = ShimLaunch(GFX1100.arch)
    with launch.knows():
        rows = TABLE.rows.measure("odd", PROBLEM, Setting(CPU, GFX1100, launch, 1))
    first, *others = [row for row in rows if not row.reason]
    assert first.way == "rocm_sd" and first.config is not None and others
    text = TABLE.render("a card", rows)
    assert "odd: B1 H1 Sq17 Sk15 D40 float16" in text and "queries.waves=4" in text
    assert f"{first.median / others[0].median:.2f}" in text


def test_flash_is_timed_as_it_is_and_with_the_same_bits() -> None:
    def switches() -> tuple[bool, bool, bool]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        )

    asked: list[tuple[bool, bool, bool]] = []
    before = switches()

    def followed(inputs: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        given = [torch.ones(2, requires_grad=True) for _ in range(3)]
        output = sum(given, torch.zeros(2))
        output.register_hook(lambda grad: asked.append(switches()))
        return given, output

    row = Row(way=gradients.FLASH)
    ways = list(gradients.torchs_ways(row, followed))
    assert [way.row.way for way in ways] == ["sdpa flash", "sdpa flash, same bits"]
    for way in ways:
        inputs: Any = SimpleNamespace(grad=torch.ones(2))
        way.both(inputs)
        way.backward(inputs)()
    assert asked == [before, before, (True, False, False), (True, False, False)]
    assert switches() == before
    other = replace(row, way="sdpa")
    assert len(list(gradients.torchs_ways(other, followed))) == 1
