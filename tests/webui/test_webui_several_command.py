"""tools/webui_several.py: whose pictures are counted, which are slow, which are wrong."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools import webui_several as tool
from tools.webui_client import Made
from tools.webui_several import ALONE, Case, Painter, Shot


def test_cases() -> None:
    assert Case.of("512x4") == Case("512x4", "", 512, 4)
    assert Case.of("a.safetensors:1024") == Case("a.safetensors:1024", "a.safetensors", 1024, 1)


class Played(Painter):
    """Pictures of a script: seconds, whether another card computed, how far apart."""

    def __init__(self, out: Path, pictures: list[tuple[float, bool, int]]) -> None:
        self.pictures = pictures
        self.asked_for: list[list[Any]] = []
        namespace = argparse.Namespace(out=out, steps=20, pictures=len(pictures), limit_s=60.0)
        super().__init__(None, 0.0, namespace)

    def left_s(self) -> float:
        return float(len(self.pictures))

    def shot(self, case: Case, args: list[Any], steps: int = 0) -> Shot:
        self.asked_for.append(args)
        seconds, divided, apart = self.pictures.pop(0)
        pixels = np.full((1, 2, 2, 3), apart, np.int16)
        return Shot(pixels, 20 / seconds, seconds, 30.0, "who", "why", divided, ())

    def cards(self) -> list[dict[str, Any]]:
        return [{"device": "cuda:1", "pid": None}]


@pytest.mark.parametrize(("apart", "right"), [(2, True), (3, False)])
def test_each_picture_counts_from_the_first_on(tmp_path: Path, apart: int, right: bool) -> None:
    case = Case.of("1024")
    alone = [Shot(np.zeros((1, 2, 2, 3), np.int16), 20.0, 1.0, 30.0, "one card", "", False, ())] * 3
    played = Played(
        tmp_path, [(1.39, False, 0), (1.41, False, 1), (0.5, True, 1), (0.5, True, apart)]
    )
    played.compared(case, alone, "1")
    (row,) = json.loads((tmp_path / "webui-several.json").read_text())["rows"]
    assert row["slow"] == [2] and row["apart"] == apart and row["cards"] == "and 1"
    assert row["of one card's"] == {"it_s": 2.0, "picture_s": 0.5, "decode_ms": 1.0}
    assert len(row["shots"]) == 4 and played.is_right is right
    assert all(args == [*ALONE[:5], "Auto", "1"] for args in played.asked_for)


def test_nobody_is_killed_where_there_is_no_process(tmp_path: Path, capsys: Any) -> None:
    played = Played(tmp_path, [])
    alone = [Shot(np.zeros((1, 2, 2, 3), np.int16), 20.0, 1.0, 30.0, "one card", "", False, ())]
    played.faults(Case.of("512"), alone, "")
    assert "the other card is not there" in capsys.readouterr().out and not played.rows


def test_a_picture_is_read_from_the_probe_and_the_status(tmp_path: Path) -> None:
    class Asked(Painter):
        def ask(self, route: str, body: Any = None) -> Any:
            return [{"kind": "sample", "s": 0.5}, {"kind": "decode", "s": 0.03}]

        def make(self, body: Any, route: str = "txt2img") -> Made:
            assert body["width"] == 64 and body["batch_size"] == 2
            made = Made((), "", 0.7)
            vars(made)["frames"] = (np.zeros((2, 2, 3), np.int16),) * 2
            return made

        def status(self) -> Any:
            vae = {"why": "the picture is small"}
            return {"several": {"runs": "both", "rows": [1, 1], "why": [], "vae": vae}}

    shot = Asked(None, 0.0, argparse.Namespace(steps=20)).shot(Case.of("64x2"), tool.SEVERAL)
    assert (shot.it_s, shot.picture_s, shot.decode_ms) == (40.0, 0.7, 30.0)
    assert (
        shot.is_divided
        and shot.rows == (1, 1)
        and shot.why == "the picture is small"
        and "pixels" not in shot.row()
    )
