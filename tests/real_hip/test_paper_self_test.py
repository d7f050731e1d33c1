"""`doctor --self-test` above AMD's own runtime, as a card's owner runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from lib_rocm_sd.arch import PACKAGE
from lib_rocm_sd.ops import registry
from lib_rocm_sd.runtime import process
from tests.real_hip.debian import LIMIT_S, Card
from tests.real_hip.test_paper_card import on

STARTED = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.real_hip.self_test import main
raise SystemExit(main(*sys.argv[2:]))
"""


@on(("trixie", "gfx1100"), ("bookworm", "gfx1030"), ("trixie", "gfx90a"))
def test_every_op_passes(card: Card, fresh_cache: Path, tmp_path: Path) -> None:
    """One kernel in a process of its own, and the smallest case of each op in the doctor's."""
    out = tmp_path / "result.json"
    words = [sys.executable, "-c", STARTED, str(PACKAGE.parent), card.row.gfx, card.library]
    done = process.run([*words, sys.executable, str(out)], limit_s=LIMIT_S)
    assert not done.trouble and card.paper.wrong == [], done.output
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["complete"] and found["passed"] == len(found["rows"])
    assert {row["op"] for row in found["rows"]} == {op.name for op in registry.ops()}
    assert found["machine"]["gfx"] == card.row.gfx
    assert [each["outcome"] for each in found["verdicts"]] == ["passed"]
    assert all(row["error"] <= row["tolerance"] for row in found["rows"])
    launched = {entry for entry, _, _ in card.paper.launched}
    assert {"attention_forward", "attention_backward", "conv3x3", "linear", "layer_norm"} < launched
