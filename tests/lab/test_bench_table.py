"""A table of `bench`: which cases, and what is left of an interrupted run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lib_rocm_sd import __main__
from lib_rocm_sd.lab.tables import TABLES

COMMAND = ("bench", "layer_norm", "--small", "--runs", "1", "--device", "cpu")


def written(file: Path) -> tuple[bool, set[str]]:
    document = json.loads(file.read_text(encoding="utf-8"))
    return document["complete"], {row["label"] for row in document["rows"]}


def test_only_the_cases_that_are_named(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    assert __main__.main([*COMMAND, "--case", "ODD 2", "--json", str(file)]) == 0
    assert written(file) == (True, {"odd 2"})


def test_a_case_that_is_none_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main([*COMMAND, "--case", "nonsense"]) == 2
    assert "no case has nonsense in its name or shape" in capsys.readouterr().err


@pytest.mark.parametrize("op", ["call", "door", "vae", "speed", "distributed"])
def test_without_cases_none_can_be_named(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["bench", op, "--case", "SDXL"]) == 2
    assert f"--case: {op} has no cases" in capsys.readouterr().err


def test_an_interrupted_run_leaves_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    rows: Any = TABLES["layer_norm"].rows
    measure = rows.measure

    def once(label: str, *more: Any) -> list[Any]:
        if label == "odd 2":
            assert written(file) == (False, {"odd 1"}), "before the next one is measured"
            raise KeyboardInterrupt
        return measure(label, *more)

    monkeypatch.setattr(rows, "measure", once)
    assert __main__.main([*COMMAND, "--json", str(file)]) == 130
    assert written(file) == (False, {"odd 1"})
    said = capsys.readouterr()
    assert "interrupted" in said.err and "1x8 float16" in said.out
