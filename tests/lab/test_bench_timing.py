"""How `bench attention` warms a device up, and what `bench call` times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd import __main__
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.engine.planner import default_launcher
from lib_rocm_sd.lab import attention, call, timing
from lib_rocm_sd.lab.attention import SDPA, AttentionEffort
from lib_rocm_sd.lab.benchmark import Setting
from lib_rocm_sd.lab.rows import OURS, Row
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from tests.played import GPU, played

__all__ = ["played"]


def test_warming_up_tells_how_long_a_submission_takes(played: Any) -> None:
    device = played(submit_us=30.0, work_us=4.0)
    assert timing.warm_up(device.call, GPU) == pytest.approx(30e-6)


def test_the_cache_of_an_amd_card_is_taken_for_large(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        L2_cache_size = 60 << 20

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    monkeypatch.setattr(torch.version, "hip", None)
    assert timing.cache_bytes(GPU) == 60 << 20
    assert timing.sets_needed(4 << 20, GPU) == 32
    monkeypatch.setattr(torch.version, "hip", "7.2")
    assert timing.cache_bytes(GPU) == 256 << 20
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: object())
    assert timing.cache_bytes(GPU) == 256 << 20


# -- what a call costs the CPU


def measured(
    problem: AttentionProblem, device: torch.device, calls: int, **more: float
) -> list[Row]:
    with torch.no_grad():
        sides = call._sides(problem, device, Engine())
    return call.measure("small", problem, device, sides, calls, **more)


def test_both_sides_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real = call._batch

    def batch(side: Any, inputs: Any, device: Any) -> list[float]:
        order.append(getattr(side, "__name__", "?"))
        return real(side, inputs, device)

    monkeypatch.setattr(call, "_batch", batch)
    monkeypatch.setattr(call, "BATCH", 3)
    problem = AttentionProblem(1, 2, 8, 8, 8, "float32")
    rows = measured(problem, torch.device("cpu"), 6)
    assert [row.way for row in rows] == [
        "engine.run",
        "scaled_dot_product_attention",
        "an empty output",
    ]
    assert rows[0].variant == "sdpa" and {row.runs for row in rows} == {6}
    assert order == ["ours", "torchs", "output_alone"] * 3
    for row in rows:
        assert row.p10 and row.median and row.p90
        assert 0 < row.p10 <= row.median <= row.p90
    lines = call.TEXT.under("head", rows).splitlines()
    assert len(lines) == 5 and lines[2].split()[6] == "engine.run"


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = AttentionProblem(1, 2, 8, 8, 8, "float32")
    monkeypatch.setattr(call, "PROBLEMS", (("small", problem),))
    made = tmp_path / "call.json"
    words = ["bench", "call", "--device", "cpu", "--runs", "60", "--json", str(made)]
    assert __main__.main(words) == 0
    assert "median of 60 calls" in capsys.readouterr().out
    content = json.loads(made.read_text(encoding="utf-8"))
    assert content["machine"]["runs"] == 60
    assert all(row["runs"] >= 60 for row in content["rows"]) and len(content["rows"]) == 3
    assert content["rows"][1]["variant"] == "sdpa" and content["rows"][1]["label"] == "small"


def test_a_call_takes_no_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "BATCH", 3)
    problem = AttentionProblem(1, 1, 8, 8, 8, "float32")
    rows = measured(problem, torch.device("cpu"), 10**9, limit_s=0.0)
    assert [row.runs for row in rows] == [3] * 3


def test_a_side_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*words: Any) -> Any:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(call.SdpaAttention, "run", fail)
    problem = AttentionProblem(1, 2, 8, 8, 8, "float32")
    rows = measured(problem, torch.device("cpu"), 1)
    assert rows[1].reason == "RuntimeError: no kernel" and rows[0].median > 0
    assert "not timed: RuntimeError: no kernel" in call.TEXT.under("head", rows)


# -- on a GPU


@pytest.mark.gpu
def test_ours_is_timed_beside_torchs_on_the_device() -> None:
    info = identify(GPU)
    assert info.arch is not None
    launch = default_launcher(GPU, info.arch)
    problem = AttentionProblem(2, 8, 1024, 77, 40)
    setting = Setting(GPU, info, launch, 20)
    effort = AttentionEffort(setting, 0.1, names=(OURS, SDPA, "Doggettx"))
    rows = {row.way: row for row in attention.measure("x", problem, effort)}
    ours, doggettx = rows[OURS], rows["Doggettx-like"]
    assert not ours.reason and not doggettx.reason and not rows[SDPA].reason
    assert ours.extra_bytes == 0 and (doggettx.extra_bytes or 0) >= problem.score_bytes
    assert 0.5 < ours.median < doggettx.median
    assert ours.median <= 1.2 * ours.waiting_us


@pytest.mark.gpu
def test_a_call_costs_the_cpu_microseconds() -> None:
    problem = AttentionProblem(2, 8, 64, 64, 160)
    ours, torchs, _ = measured(problem, GPU, 2000)
    assert ours.variant == OURS and not ours.reason and not torchs.reason
    assert ours.median < 60
