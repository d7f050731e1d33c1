"""Whole generations: what Enable does to the picture, and what stays behind when one fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import FakeGpu, Start, WebUI
from PIL import Image

CASES: dict[str, dict[str, Any]] = {
    "automatic": {},
    "batches": {"fields": {"batch_size": 2, "n_iter": 2}},
    "hires": {"fields": {"enable_hr": True}},
    "refiner": {"fields": {"refiner_checkpoint": "model-7", "steps": 4}},
    "checkpoint": {"fields": {"override_settings": {"sd_model_checkpoint": "model-5"}}},
    "sdxl": {"family": "sgm"},
    "sdxl V1": {"family": "sgm", "args": "--opt-split-attention-v1 --opt-rocm-sd"},
    "sdp flag": {"args": "--opt-sdp-attention --opt-rocm-sd"},
    "none": {"args": "--disable-opt-split-attention"},
    "bfloat16": {"dtype": torch.bfloat16},
    "our title": {"setting": "ROCm SD - fused attention for AMD GPUs"},
}


def begin(start: Start, case: dict[str, Any], **more: Any) -> WebUI:
    options = {key: case[key] for key in ("args", "family", "dtype") if key in case}
    if not more.get("extension", True):  # the flag is ours: without the extension there is none
        options["args"] = options.get("args", "").replace("--opt-rocm-sd", "")
    webui = start(**options, **more)
    if "setting" in case:
        webui.shared.opts.set("cross_attention_optimization", case["setting"])
    return webui


def same(a: Any, b: Any) -> bool:
    """Whether two generations are bit-identical, as tensors and as images."""
    assert len(a.decoded) == len(b.decoded)
    assert len(a.images) == len(b.images)
    tensors = all(torch.equal(x, y) for x, y in zip(a.decoded, b.decoded, strict=True))
    pixels = all(x.tobytes() == y.tobytes() for x, y in zip(a.images, b.images, strict=True))
    return tensors and pixels


def distance(a: Any, b: Any) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a.decoded, b.decoded, strict=True))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_off_is_bit_identical(start: Start, gpu: FakeGpu, case: dict[str, Any]) -> None:
    fields = case.get("fields", {})
    expected = begin(start, case, extension=False).txt2img(**fields)

    webui = begin(start, case, gpu=gpu)
    used = len(gpu.seen)
    off = webui.txt2img(False, "Auto", **fields)
    assert same(off, expected)
    assert len(gpu.seen) == used
    assert not webui.errors_reported

    on = webui.txt2img(True, "Auto", **fields)
    if case.get("args") == "--disable-opt-split-attention":
        assert same(on, expected)  # "Automatic" then means none at all
    else:
        assert len(gpu.seen) > used
        assert webui.is_ours()
        assert distance(on, expected) < (0.2 if "dtype" in case else 1e-3)
    again = webui.txt2img(False, "Auto", **fields)
    assert same(again, expected)


def test_on_uses_the_kernel_and_agrees(start: Start, gpu: FakeGpu) -> None:
    expected = start(extension=False).txt2img()
    webui = start(gpu=gpu)
    result = webui.txt2img()
    assert not same(result, expected)
    assert distance(result, expected) < 1e-4
    heads = {(q.shape[2], q.shape[3]) for q, _, _ in gpu.seen}
    assert (2, 40) in heads  # the UNet's
    assert (1, 16) in heads  # the VAE's


@pytest.mark.parametrize("enable", [True, False])
def test_img2img(start: Start, gpu: FakeGpu, enable: bool) -> None:
    image = Image.radial_gradient("L").resize((64, 64)).convert("RGB")
    expected = start(extension=False).img2img(init_images=[image])
    webui = start(gpu=gpu)
    used = len(gpu.seen)
    result = webui.img2img(enable, "Auto", init_images=[image])
    assert same(result, expected) is not enable
    assert distance(result, expected) < 1e-4
    assert (len(gpu.seen) > used) is enable


def test_previews_do_not_disturb(start: Start, gpu: FakeGpu) -> None:
    expected = start(extension=False).txt2img(steps=4)
    webui = start(gpu=gpu)
    webui.shared.opts.show_progress_every_n_steps = 1
    assert same(webui.txt2img(False, steps=4), expected)
    assert webui.shared.state.current_image is not None


@pytest.mark.parametrize("enable", [True, False])
def test_crash_in_the_middle(start: Start, gpu: FakeGpu, enable: bool) -> None:
    expected_off = start(extension=False).txt2img()
    expected_on = start(gpu=gpu).txt2img()

    webui = start(gpu=gpu)
    model = webui.shared.sd_model
    whole, calls = model.apply_model, []

    def break_down(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("a planted crash")
        return whole(*args, **kwargs)

    model.apply_model = break_down
    with pytest.raises(RuntimeError, match="planted"):
        webui.txt2img(enable)
    model.apply_model = whole

    assert same(webui.txt2img(True), expected_on)
    assert webui.is_ours()
    assert same(webui.txt2img(False), expected_off)


def test_model_change_after_a_crash_with_enable_off(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    model = webui.shared.sd_model
    model.apply_model = None
    with pytest.raises(TypeError):
        webui.txt2img(False)
    webui.shared.opts.sd_model_checkpoint = "model-3"
    result = webui.txt2img(True)
    assert webui.is_ours()
    assert "rocm_sd" in result.info


@pytest.mark.parametrize("enable", [True, False])
def test_interrupt(start: Start, gpu: FakeGpu, enable: bool) -> None:
    webui = start(gpu=gpu)
    webui.shared.state.interrupted = True
    webui.txt2img(enable)
    webui.shared.state.interrupted = False
    assert webui.is_ours()
    assert "rocm_sd" in webui.txt2img(True).info


def test_generation_inside_another(start: Start, gpu: FakeGpu) -> None:
    """An extension that generates between two batches, with other arguments."""
    expected = start(extension=False).txt2img(n_iter=2)
    webui = start(gpu=gpu)
    inner: list[Any] = []

    class Nested(webui.scripts.Script):  # type: ignore[name-defined]
        def postprocess_batch(self, p: Any, *args: Any, **kwargs: Any) -> None:
            if not inner:
                inner.append(None)
                inner[0] = webui.txt2img(True, "Memory")

    nested = Nested()
    nested.args_from = nested.args_to = 0
    webui.scripts.scripts_txt2img.alwayson_scripts.append(nested)
    assert same(webui.txt2img(False, "Auto", n_iter=2), expected)
    assert "Memory, attention: " in inner[0].info


def test_another_optimizer_is_not_overridden(start: Start, gpu: FakeGpu) -> None:
    webui = start(extension=False)
    webui.shared.opts.set("cross_attention_optimization", "sdp - scaled dot product")
    expected = webui.txt2img()
    webui = start(gpu=gpu)
    webui.shared.opts.set("cross_attention_optimization", "sdp - scaled dot product")
    for enable in (True, False):
        result = webui.txt2img(enable)
        assert same(result, expected)
        assert "ROCm SD" not in result.info
    assert webui.applied == "sdp"
    assert "'sdp - scaled dot product'" in webui.status


def test_without_a_gpu_nothing_changes(start: Start) -> None:
    """The real engine on this machine's CPU: nothing is faked, nothing is imported beforehand."""
    expected = start(extension=False, cuda=False).txt2img()
    webui = start(cuda=False)
    assert webui.applied == "InvokeAI"
    for enable in (True, False):
        result = webui.txt2img(enable)
        assert same(result, expected)
        assert "ROCm SD" not in result.info
    assert webui.status.startswith("Not active")
    assert not webui.errors_reported
