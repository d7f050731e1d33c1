"""`bench door`: every way of registering is timed, and the difference is told."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from lib_rocm_sd import __main__
from lib_rocm_sd.lab import call as door
from lib_rocm_sd.lab.rows import Row


def test_every_way_is_timed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "door.json"
    words = ["bench", "door", "--device", "cpu", "--runs", "3", "--json", str(file)]
    assert __main__.main(words) == 0
    out = capsys.readouterr().out
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    sides = [row["side"] for row in rows]
    assert sides[:2] == [door.DIRECT, door.OPERATOR]
    assert len(sides) == (4 if hasattr(torch.library, "custom_op") else 2)
    assert all(row["median_us"] > 0 and side in out for row, side in zip(rows, sides, strict=True))


def test_a_door_costs_what_the_direct_call_does_not() -> None:
    def row(side: str, median: float = math.nan) -> Row:
        return Row(case="one", problem="problem", way=side, median=median)

    said = door.told([row(door.DIRECT, 10.0), row(door.OPERATOR, 14.25), row("other")])
    assert said == f"the door of an operator costs a call: {door.OPERATOR} 4.2 us"
    assert "not timed" in door.told([row(door.DIRECT), row(door.OPERATOR, 14.25)])
