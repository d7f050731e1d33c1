"""`bench attention`, the command: its options, and what it writes."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd import __main__
from lib_rocm_sd.lab import attention, timing
from lib_rocm_sd.lab.rows import OURS
from lib_rocm_sd.ops.attention.problem import CASES, ODD
from tests.lab.test_bench_attention import Broken


def bench(*words: str) -> int:
    return __main__.main(["bench", "attention", "--device", "cpu", *words])


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MOST_SETS", 2)
    monkeypatch.setattr(timing, "WARM_S", 0.001)


@pytest.mark.usefixtures("brief")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, drawn = tmp_path / "a.json", tmp_path / "a.svg"
    assert bench("--small", "--runs", "2", "--json", str(made), "--plot", str(drawn)) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n  sub-quadratic-like ") == len(ODD)
    assert "not timed: written for the comparison, without masks" in printed
    content = json.loads(made.read_text(encoding="utf-8"))
    assert content["complete"] and content["machine"]["runs"] == 2
    assert {row["label"] for row in content["rows"]} == {f"odd {n + 1}" for n in range(len(ODD))}
    row = next(row for row in content["rows"] if row["variant"] == "sliced")
    assert row["median_us"] > 0 and row["extra_bytes"] is None and row["problem"]["head_dim"] == 8
    assert ElementTree.fromstring(drawn.read_text(encoding="utf-8")).tag.endswith("svg")
    assert bench("--from", str(made), "--variant", "sdpa") == 0
    assert capsys.readouterr().out == printed


@pytest.mark.usefixtures("brief")
def test_filters(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--small", "--runs", "1", "--case", "odd 2", "--case", "d248", "--variant", "SLICED"]
    assert bench(*words) == 0
    printed = capsys.readouterr().out
    assert "odd 7" in printed and "odd 2" in printed and "odd 1" not in printed
    assert printed.count("\n  sliced ") == 2 and "Doggettx-like" not in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--case", "nothing"], "no case has nothing"),
        (["--variant", "nobody"], "has nobody in its name"),
        (["--plot", "/no/such/folder/x.svg"], "--plot: there is no folder"),
        (["--runs", "0"], "--runs must be at least 1"),
        (["--from", "/no/such/file"], "--from /no/such/file"),
    ],
)
def test_bad_options(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--small", *words) == 2
    assert said in capsys.readouterr().err


def test_dtypes_are_both_unless_one_is_named() -> None:
    class Words:
        small, quick, case, dtype = False, False, None, None

    words: Any = Words()
    cpu = torch.device("cpu")
    assert len(attention.problems(words, cpu)) == 2 * len(CASES)
    words.dtype = ["bfloat16"]
    assert {problem.dtype for _, problem in attention.problems(words, cpu)} == {"bfloat16"}


def test_quick_is_one_dtype_and_on_a_cpu_what_takes_seconds() -> None:
    class Words:
        small, quick, case, dtype = False, True, None, None

    words: Any = Words()
    on_gpu = attention.problems(words, torch.device("cuda"))
    assert [label for label, _ in on_gpu] == [case.name for case in CASES if case.usual]
    on_cpu = attention.problems(words, torch.device("cpu"))
    assert on_cpu and all(problem.flops <= attention.QUICK_CPU_FLOPS for _, problem in on_cpu)
    words.case = ["VAE mid-block, 1024x1024"]
    assert len(attention.problems(words, torch.device("cpu"))) == 1


def test_a_wrong_kernel_of_ours_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], brief: None
) -> None:
    wrong = Broken("last value")
    wrong.name = OURS
    monkeypatch.setattr(attention, "ALL", (wrong,))
    assert bench("--small", "--case", "odd 7", "--runs", "1") == 1
    assert "wrong: error" in capsys.readouterr().out
