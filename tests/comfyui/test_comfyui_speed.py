"""The node of the speed test, and its plot."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd.hosts.comfyui import nodes, speedtest
from lib_rocm_sd.hosts.comfyui import unet as comfy_unet
from lib_rocm_sd.lab.rows import Row
from lib_rocm_sd.lab.speed_result import Document
from tests.comfyui.play import CARD
from tests.comfyui.test_comfyui_nodes import vae_of
from tests.comfyui.unet_steps import forwards, model_of, step, with_ours


@pytest.fixture(autouse=True)
def outputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folders: Any = types.ModuleType("folder_paths")
    folders.get_output_directory = lambda: str(tmp_path)
    monkeypatch.setitem(sys.modules, "folder_paths", folders)
    return tmp_path / speedtest.FOLDER


def run(model: Any = None, vae: Any = None) -> tuple[torch.Tensor, dict[str, Any], str]:
    node = nodes.RocmSdSpeedTest()
    with torch.inference_mode():
        shown = node.run("quick", "Auto", model, vae)
    plot, content, text = shown["result"]
    assert shown["ui"] == {"text": [text]}
    return plot, json.loads(content), text


def rows(content: dict[str, Any], test: str) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in content["rows"] if row["test"] == test}


def test_without_a_card_nothing_is_timed_or_kept(comfy: Any, outputs: Path) -> None:
    _, content, text = run(model_of(comfy), vae_of(comfy))
    why = "nothing of ROCm SD can run here (no GPU: this is the CPU)"
    assert text == f"The speed test did not run: {why}" and content == {"reason": why}
    assert not outputs.exists()


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is a card of ours, as far as the node asks; nothing is compiled or tried for it."""
    monkeypatch.setattr(speedtest, "identify", lambda device: CARD)


def test_a_card_that_nothing_of_ours_runs_on_says_so_first(
    comfy: Any, known: None, outputs: Path
) -> None:
    model, vae = model_of(comfy), vae_of(comfy)
    vae.patcher = None
    plot, content, text = run(model, vae)
    assert text.startswith("Nothing of ROCm SD ran: no GPU: this is the CPU.\n\n### Speed test")
    assert content["complete"] and content["request"]["what"] == ["attention", "vae", "step"]
    assert "ComfyUI's current (attention_pytorch)" in rows(content, "attention")
    for test in ("attention", "vae", "step"):
        found = rows(content, test)
        assert "no GPU: this is the CPU" in found.pop("rocm_sd")["reason"]
        assert found and all(row["median"] > 0 and not row["reason"] for row in found.values())
    assert "no GPU" in text and plot.shape[0] == 1 and plot.shape[2:] == (speedtest.WIDTH, 3)
    (kept,) = outputs.glob("*.json")
    assert json.loads(kept.read_text(encoding="utf-8"))["id"] == content["id"]


def test_it_is_about_the_card_that_the_model_is_on(comfy: Any) -> None:
    """Another extension may bring it to another card than ComfyUI computes on."""
    model, vae = model_of(comfy), vae_of(comfy)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    model.load_device, vae.patcher = second, types.SimpleNamespace(load_device=first)
    assert speedtest.Comfy(model, vae, "Auto").device == second
    assert speedtest.Comfy(None, vae, "Auto").device == first
    assert speedtest.Comfy(None, None, "Auto").device == torch.device("cpu")


def test_a_step_is_ours_where_it_can_be(
    comfy: Any, known: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comfy_unet, "unusable", lambda device: [])
    model = model_of(comfy)
    _, content, text = run(model)
    assert text.startswith("### Speed test")
    ours = rows(content, "step")["rocm_sd"]
    assert ours["median"] > 0 and 0 < ours["error"] < 0.1
    assert (
        "vae" not in content["request"]["what"] and not model.model_options["transformer_options"]
    )
    step(model)
    assert not forwards(model)


def test_a_step_is_the_models_with_its_patches(
    comfy: Any, known: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both of its rows, and without what a node of ours has set already."""
    monkeypatch.setattr(comfy_unet, "unusable", lambda device: [])
    seen: list[bool] = []

    def patch(h: Any, other: Any, options: Any) -> Any:
        seen.append("apply_model" in options.get("wrappers", {}))
        return h, other

    model = with_ours(model_of(comfy))
    model.model_options["transformer_options"]["patches"] = {"output_block_patch": [patch]}
    _, content, _ = run(model)
    assert len(rows(content, "step")) == 2 and set(seen) == {True, False}
    assert not any(row["reason"] for row in rows(content, "step").values())


def test_what_is_no_unet_says_so(comfy: Any, known: None) -> None:
    base = comfy.base.BaseModel({"query_dim": 32, "heads": 4, "dim_head": 8})
    _, content, text = run(comfy.patcher.ModelPatcher(base, None, None))
    assert "not a UNet" in rows(content, "step")["rocm_sd"]["reason"] and "not a UNet" in text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("one plain reason"), "one plain reason"),
        (KeyError("x"), "KeyError: 'x'"),
        (torch.cuda.OutOfMemoryError("out of memory"), "out of memory"),
    ],
    ids=["a reason", "a mistake", "memory"],
)
def test_a_test_that_cannot_run_fails_no_workflow(
    comfy: Any, known: None, error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(models: Any) -> None:
        raise error

    monkeypatch.setattr(comfy.management, "load_models_gpu", fails)
    plot, content, text = run(model_of(comfy))
    assert content == {"reason": said} and text.endswith(f"did not run: {said}")
    assert plot.shape == (1, 2 * speedtest.PAD + speedtest.LINE, speedtest.WIDTH, 3)


def test_cancel_ends_it_as_comfyui_does(
    comfy: Any, known: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speedtest, "POLL_S", 0.01)
    comfy.management.interrupt_current_processing()
    with pytest.raises(comfy.management.InterruptProcessingException):
        run()
    assert not speedtest.speed.running


def test_it_is_asked_each_time() -> None:
    changed = nodes.RocmSdSpeedTest.IS_CHANGED()
    assert changed != changed


def test_the_plot_has_a_bar_for_each_time() -> None:
    """The longest bar is of full length, ours has its colour, and a reason has no bar."""
    made = [
        Row("step", "512", "extension off", median=4.0),
        Row("step", "512", "rocm_sd", median=1.0),
        Row("step", "1024", "rocm_sd", reason="no memory"),
    ]
    plot = speedtest.plot_of(Document({"card": "a card"}, {}, made))
    assert plot.dtype == torch.float32 and plot.min() >= 0 and plot.max() <= 1

    def length(line: int, colour: str) -> int:
        wanted = torch.tensor([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)])
        row = plot[0, speedtest.PAD + line * speedtest.LINE + speedtest.LINE // 2, :, :]
        return int((row - wanted).abs().amax(-1).lt(1e-3).sum())

    assert length(4, speedtest.COLOURS[1]) == speedtest.BAR + 1
    assert length(5, speedtest.COLOURS[0]) == round(speedtest.BAR / 4) + 1
    assert length(8, speedtest.COLOURS[0]) == 0
    assert plot.shape[1] == 2 * speedtest.PAD + 9 * speedtest.LINE
