"""The program of docs/distributed.md runs as it stands, and what the text names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from lib_rocm_sd import distributed
from tests.distributed import ranks
from tests.distributed.launch import launch, made

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
(PROGRAM,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_the_program() -> None:
    first, second = made(launch(ranks.example, 2, PROGRAM, "docs/distributed.md"))
    for found in (first, second):
        assert (found["steps"], found["rows"], found["decodes"]) == (2, 2, 1)
        assert found["sent_bytes"] > 0
    assert first["count"] == 3
    assert 0 < first["mean"] < 255
    assert "count" not in second


def test_each_way_is_told() -> None:
    rows = re.findall(r"^\| `(\w+)", TEXT, re.MULTILINE)
    assert set(rows) >= {"for_each", "guidance_split", "patch_parallel", "vae_bands", "in_stages"}
    assert set(rows) <= set(distributed.__all__)
