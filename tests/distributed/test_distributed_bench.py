"""`bench distributed` on gloo, with small models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("diffusers", reason="diffusers is not installed")

from lib_rocm_sd.__main__ import main
from tests.distributed import ranks
from tests.distributed.launch import launch, made


def test_each_way_beside_one_rank(tmp_path: Path) -> None:
    path = tmp_path / "distributed.json"
    words = ("bench", "distributed", "--device", "cpu", "--runs", "1", "--json", str(path))
    assert made(launch(ranks.command, 2, words)) == [0, 0]
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [member["rank"] for member in found["machine"]["members"]] == [0, 1]
    rows = {(row["test"], row["case"], row["way"]): row for row in found["rows"]}
    tests = [test for test, _, _ in rows]
    assert tests.count("swap") == tests.count("gather") == 2
    assert tests.count("patch parallel") == 2
    assert tests.count("guidance split") == tests.count("batch split, 2 pictures") == 2
    for (test, case, _), row in rows.items():
        assert row["ms"] > 0 and row["ranks"] == 2 and row["exchanges"] >= 1
        if test in ("swap", "gather"):
            assert row["sent_mib"] == int(case.split()[0]) / 2**20
            assert row["one_ms"] is row["equal"] is row["error"] is None
        else:
            assert row["one_ms"] > 0 and row["sent_mib"] > 0
            assert row["error"] < (1e-5 if test == "VAE bands" else 0.01) and not row["told"]
    assert rows["VAE bands", "decode 256x256", "rocm_sd"]["equal"]


def test_without_torchrun_it_says_how(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["bench", "distributed", "--device", "cpu"]) == 2
    assert "torchrun --nproc-per-node 2 -m lib_rocm_sd bench" in capsys.readouterr().err
