"""The examples of docs/diffusers.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from tests.hosts import tiny_pipelines as tiny

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "diffusers.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(heading: str) -> list[str]:
    """The Python below a heading of the document."""
    (part,) = [part for part in TEXT.split("\n## ") if part.startswith(f"{heading}\n")]
    found: list[str] = FENCE.findall(part)
    return found


def run(heading: str, **names: Any) -> dict[str, Any]:
    for example in examples(heading):
        exec(compile(example, "docs/diffusers.md", "exec"), names)
    return names


def test_each_example_is_run() -> None:
    headings = ("A pipeline", "By name", "Plain torch")
    assert sum(len(examples(heading)) for heading in headings) == len(FENCE.findall(TEXT))
    assert all(map(examples, headings))


def test_a_pipeline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = run("A pipeline")
    assert made["picture"].size == (128, 128)
    assert "16 attentions have a processor of ours, 0 keep theirs" in capsys.readouterr().out
    assert made["switch"].patch.replaced == 16
    assert not any("forward" in vars(m) for m in made["pipeline"].vae.modules())


def test_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(
        "diffusers.models.attention_dispatch", reason="this diffusers has no attention backends"
    )
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

    monkeypatch.setattr(Registry, "_active_backend", Registry._active_backend)
    pipeline = tiny.made("Flux")
    prompt = tiny.prompt_of("Flux", torch.float32)
    made = run("By name", pipeline=pipeline, prompt=prompt)
    assert made["picture"].shape == (3, tiny.SIDE, tiny.SIDE)


def test_plain_torch() -> None:
    made = run("Plain torch")
    assert made["out"].shape == (1, 64, 8 * 40)
