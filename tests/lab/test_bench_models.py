"""`python -m lib_rocm_sd bench models` on the CPU, with little models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd import __main__
from lib_rocm_sd.lab.model_cases import CASES, Case, Scene

pytest.importorskip("diffusers", reason="diffusers is a dev extra")

from lib_rocm_sd.commands import bench_models
from tests.dit.any_transformer import taken_over

CPU = torch.device("cpu")
TINY = ["bench", "models", "--small", "--device", "cpu", "--dtype", "bfloat16", "--runs", "1"]


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def rows_of(file: Path) -> list[dict[str, Any]]:
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["complete"] is True and document["machine"]["dtype"] == "bfloat16"
    rows: list[dict[str, Any]] = document["rows"]
    return rows


def test_the_whole_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A UNet, it with what is done to it, and a transformer; each by torch and by ours."""
    few = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "mid_block_type": None}
    cases = [named("SD 1.5"), named("SD 1.5, mask for the prompt"), named("PixArt-Alpha 512x512")]
    monkeypatch.setattr(
        bench_models, "CASES", (*(replace(case, more=few) for case in cases[:2]), cases[2])
    )
    file = tmp_path / "m.json"
    assert __main__.main([*TINY, "--json", str(file)]) == 0
    rows = rows_of(file)
    assert [row["way"] for row in rows] == ["torch", "rocm_sd"] * 3
    for row in rows:
        assert not row["reason"] and row["device_ms"] > 0 and row["wall_ms"] > 0
        assert 0 < row["error"] < 0.1 and row["submit_ms"] is None
    assert [row["of_eager"] for row in rows[::2]] == [1.0] * 3
    assert rows[0]["of_plain"] is None and rows[3]["of_plain"] > 0
    own = rows[1]["blocks"].split(" of ")
    assert own[0] == own[1] != "0" and rows[5]["blocks"] == "2 of 2"
    assert any("with a processor of ours" in note for note in rows[5]["told"])
    assert "SD 1.5, mask for the prompt, rocm_sd:" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["Chroma", "Wan", "Z-Image"])
def test_all_blocks_of_a_transformer_are_ours(kind: str) -> None:
    case = next(case for case in CASES if case.name.startswith(kind))
    with torch.no_grad():
        scene = case.scene(CPU, torch.bfloat16, small=True)
        taken = taken_over(scene.parts["transformer"])
        scene.step()
    assert all(row.ours == row.total and not row.left for row in taken.report())


def test_what_cannot_be_made_has_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(scene: Scene) -> None:
        raise torch.OutOfMemoryError("too much")

    absent = replace(named("SD 1.5"), needs=("a_package_that_is_none",))
    monkeypatch.setattr(
        bench_models, "CASES", (absent, replace(named("SD 3"), name="short", change=fails))
    )
    file = tmp_path / "m.json"
    assert __main__.main([*TINY, "--json", str(file)]) == 0
    reasons = [row["reason"] for row in rows_of(file)]
    assert reasons[0] == reasons[1] and "pip install a_package_that_is_none" in reasons[0]
    assert all(reason.startswith("out of memory") for reason in reasons[2:])


def test_a_result_that_is_no_number_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(scene: Scene) -> None:
        scene.call = lambda parts, given: torch.full((1,), torch.nan)

    monkeypatch.setattr(bench_models, "CASES", (replace(named("SD 3"), change=spoiled),))
    assert __main__.main(TINY) == 1


def test_no_case_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main([*TINY, "--case", "no such model"]) == 2
    assert "no case is left" in capsys.readouterr().err


def test_plain_rows_come_first() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    for place, case in enumerate(CASES):
        assert not case.plain or case.plain in names[:place]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_row_can_be_made(case: Case) -> None:
    if case.missing():
        pytest.skip(case.missing())
    with torch.no_grad():
        made = case.scene(CPU, torch.float32, small=True).step()
        assert made.isfinite().all() and float(made.std()) > 0
        again = case.scene(CPU, torch.float32, small=True)
        assert torch.equal(again.copy().step(), made)
