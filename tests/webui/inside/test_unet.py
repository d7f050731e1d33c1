"""The UNet's blocks in generations that go well: whose they are, and what the WebUI is told."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from conftest import FakeGpu, Start
from PIL import Image
from unet_help import (
    AUTO,
    BLOCKS,
    CALLED,
    WITHOUT,
    begin,
    blocks_shown,
    bytes_of,
    ours,
    session_of,
    steps_of,
    unet_of,
    untouched,
)
from vae_help import add_script, distance, same, value_of

PICTURE = Image.radial_gradient("L").resize((64, 64)).convert("RGB")
NEAR = 0.12
"""Of bfloat16's steps with random weights; two other pictures are further apart."""


@pytest.fixture
def gpu() -> FakeGpu:
    made = FakeGpu()
    made.norms = True
    return made


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "batches": {"batch_size": 2, "n_iter": 2},
    "hires": {"enable_hr": True},
    "odd size": {"width": 72, "height": 104},
    "checkpoint": {"override_settings": {"sd_model_checkpoint": "model-5"}},
    "refiner": {"refiner_checkpoint": "model-7", "steps": 4},
    "plain sdxl": {},
    "hires sdxl": {"enable_hr": True},
    "refiner sdxl": {"refiner_checkpoint": "model-7", "steps": 4},
}


@pytest.mark.parametrize("case", CASES)
def test_on_and_off(start: Start, gpu: FakeGpu, monkeypatch: Any, case: str) -> None:
    fields = CASES[case]
    family = "sgm" if case.endswith("sdxl") else "ldm"
    expected = begin(start, family=family).txt2img(**fields)
    webui = begin(start, gpu, family=family)
    seen = steps_of(webui, monkeypatch)
    webui.sd_models.reload_model_weights()
    before = bytes_of(webui)

    assert same(webui.txt2img(False, **fields), expected)
    attention_only = webui.txt2img(*WITHOUT, **fields)
    assert not seen and untouched(webui)
    assert "ROCm SD UNet: off" in attention_only.info

    on = webui.txt2img(*AUTO, **fields)
    steps = [title for title in seen if title == "downsampling"]
    made = fields.get("steps", 3) * fields.get("n_iter", 1)
    assert len(steps) == made + (2 if "enable_hr" in fields else 0)
    each = CALLED if family == "ldm" else BLOCKS  # the double's sgm has ldm's FeedForward: theirs
    assert len(seen) == each * len(steps)
    assert (
        f'ROCm SD UNet: "Auto, {BLOCKS} of {BLOCKS} blocks, linear: torch, conv: torch' in on.info
    )
    assert distance(on, attention_only) < NEAR
    assert not same(on, attention_only)
    assert ours(webui) == BLOCKS

    assert same(webui.txt2img(False, **fields), expected)
    assert untouched(webui) and len(seen) == each * len(steps)
    webui.sd_models.reload_model_weights()
    assert {name: strides for name, (strides, _) in bytes_of(webui).items()} == {
        name: strides for name, (strides, _) in before.items()
    }
    assert not webui.errors_reported


def test_off_gives_back_bytes_and_strides(start: Start, gpu: FakeGpu) -> None:
    webui = begin(start, gpu)
    before = bytes_of(webui)
    webui.txt2img(*AUTO)
    assert bytes_of(webui) != before  # convolutions lie in channels-last memory
    webui.txt2img(*WITHOUT)
    assert bytes_of(webui) == before and untouched(webui)


def test_blocks_stay_ours_between_generations(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = begin(start, gpu)
    webui.txt2img(*AUTO)
    stand_in = webui.library("unet.stand_in").BlockStandIn
    reads: list[Any] = []
    whole = stand_in._read
    monkeypatch.setattr(stand_in, "_read", lambda *args: (reads.append(args), whole(*args))[1])
    first = {name: parameter.data_ptr() for name, parameter in unet_of(webui).named_parameters()}
    webui.txt2img(*AUTO)
    again = {name: parameter.data_ptr() for name, parameter in unet_of(webui).named_parameters()}
    assert not reads and again == first


def test_img2img(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    expected = begin(start).img2img(init_images=[PICTURE])
    webui = begin(start, gpu)
    seen = steps_of(webui, monkeypatch)
    on = webui.img2img(*AUTO, init_images=[PICTURE])
    assert seen and distance(on, expected) < 2 * NEAR
    assert same(webui.img2img(False, init_images=[PICTURE]), expected)


@pytest.mark.parametrize("level", ["Performance", "Memory"])
def test_another_level_is_another_session(start: Start, gpu: FakeGpu, level: str) -> None:
    webui = begin(start, gpu)
    webui.txt2img(*AUTO)
    taken = session_of(webui)._taken
    result = webui.txt2img(True, level, "Off", 0, "Auto")
    assert session_of(webui)._taken is not taken
    assert session_of(webui)._taken._session.level == level
    assert f"{BLOCKS} of {BLOCKS} blocks" in result.info


def test_enable_off_in_mid_queue(start: Start, gpu: FakeGpu) -> None:
    """Two windows: one has Enable on and one off, and their generations take turns."""
    expected = begin(start).txt2img()
    webui = begin(start, gpu)
    on = webui.txt2img(*AUTO)
    for _ in range(2):
        assert same(webui.txt2img(False), expected)
        assert same(webui.txt2img(*AUTO), on)


def test_generation_inside_another(start: Start, gpu: FakeGpu) -> None:
    expected = begin(start).txt2img(n_iter=2)
    webui = begin(start, gpu)
    inner: list[Any] = []

    def nest(self: Any, p: Any, *args: Any, **kwargs: Any) -> None:
        if not inner:
            inner.append(None)
            inner[0] = webui.txt2img(*AUTO)

    add_script(webui, postprocess_batch=nest)
    assert same(webui.txt2img(False, n_iter=2), expected)
    assert f"{BLOCKS} of {BLOCKS} blocks" in inner[0].info and untouched(webui)


def test_interrupt(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = begin(start, gpu)
    seen = steps_of(webui, monkeypatch)
    stopping = webui.sd_samplers_common.store_latent

    def stop(decoded: Any) -> None:
        stopping(decoded)
        webui.shared.state.interrupted = True

    monkeypatch.setattr(webui.processing, "store_latent", stop)
    webui.txt2img(*AUTO, steps=9)
    assert len(seen) == CALLED
    monkeypatch.setattr(webui.processing, "store_latent", stopping)
    webui.shared.state.interrupted = False
    webui.txt2img(*AUTO)
    assert len(seen) == 4 * CALLED and not webui.errors_reported


def test_refiner_that_was_loaded_before(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    """With several checkpoints in memory the WebUI tells nobody that it changes the model."""
    webui = begin(start, gpu)
    models = {"model-0": webui.shared.sd_model}
    models["model-7"] = webui.sd_models.load_model("model-7")

    def switch(sd_model: Any = None, info: Any = None, forced_reload: bool = False) -> Any:
        name = info or "model-0"
        webui.shared.sd_model = webui.sd_models.model_data.sd_model = models[name]
        return models[name]

    monkeypatch.setattr(webui.sd_models, "reload_model_weights", switch)
    switch()
    before = {name: webui.shared.sd_model for name in models}
    seen = steps_of(webui, monkeypatch)
    webui.txt2img(*AUTO, refiner_checkpoint="model-7", steps=4)
    assert len(seen) == 4 * CALLED
    assert ours(webui) == BLOCKS and webui.shared.sd_model is models["model-7"]
    webui.shared.sd_model = before["model-0"]
    assert untouched(webui)


def test_other_weights_in_the_same_model(start: Start, gpu: FakeGpu) -> None:
    """As the WebUI loads a checkpoint of the same kind: into the modules that are there."""
    webui = begin(start, gpu)
    before = webui.txt2img(*AUTO)
    model = webui.shared.sd_model
    others = {name: tensor * 0.9 for name, tensor in model.model.state_dict().items()}
    model.model.load_state_dict(others)
    webui.script_callbacks.model_loaded_callback(model)
    on, off = webui.txt2img(*AUTO), webui.txt2img(*WITHOUT)
    assert not same(on, before) and distance(on, off) < NEAR


def test_a_checkpoint_in_float8_is_the_webuis(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    """Settings > Optimizations > FP8 weight: linear layers and convolutions, not norms."""
    webui = begin(start, gpu)
    before = {name: strides for name, (strides, _) in bytes_of(webui).items()}
    webui.txt2img(*AUTO)
    model = webui.shared.sd_model
    for module in model.model.modules():
        if isinstance(module, (torch.nn.Conv2d, torch.nn.Linear)):
            module.to(torch.float8_e4m3fn)
    webui.script_callbacks.model_loaded_callback(model)
    monkeypatch.setattr(model, "apply_model", lambda x, t, cond: x)  # the double has no cast
    result = webui.txt2img(*AUTO)
    assert 'ROCm SD UNet: "Auto, left to the WebUI"' in result.info and untouched(webui)
    assert {name: strides for name, (strides, _) in bytes_of(webui).items()} == before
    said = [text for row in blocks_shown(webui) for text in row.why]
    assert len(said) == 7  # first and last layers are two kinds
    assert all(text.endswith("by Settings > Optimizations > FP8 weight") for text in said)


@pytest.mark.double_only("the real one loads other weights into the model that is there")
def test_an_unloaded_model_is_not_held(start: Start, gpu: FakeGpu) -> None:
    webui = begin(start, gpu)
    webui.txt2img(*AUTO)
    old = weakref.ref(unet_of(webui))
    webui.shared.opts.sd_model_checkpoint = "model-3"
    webui.txt2img(*AUTO)
    gc.collect()
    assert old() is None


@pytest.mark.double_only("on a CPU nothing is moved")
@pytest.mark.parametrize("flag", ["--medvram", "--lowvram"])
def test_low_vram(start: Start, gpu: FakeGpu, monkeypatch: Any, flag: str) -> None:
    """Weights move before each call, all at once or part by part; their layout goes along."""
    expected = begin(start, gpu).txt2img(*AUTO, n_iter=2)
    webui = begin(start, gpu, args=flag)
    before = bytes_of(webui)
    seen = steps_of(webui, monkeypatch)
    assert same(webui.txt2img(*AUTO, n_iter=2), expected)
    assert len(seen) == 6 * CALLED and len(webui.lowvram.moves) >= 6
    webui.txt2img(False)
    assert bytes_of(webui) == before and untouched(webui)


def test_script_reload_gives_back(start: Start, gpu: FakeGpu) -> None:
    webui = begin(start, gpu)
    before = bytes_of(webui)
    on = webui.txt2img(*AUTO)
    webui.initialize.reload_ui()
    assert bytes_of(webui) == before and untouched(webui)
    assert same(webui.txt2img(*AUTO), on) and ours(webui) == BLOCKS


def test_setting_excludes_the_blocks(start: Start, gpu: FakeGpu) -> None:
    webui = begin(start, gpu)
    webui.txt2img(*AUTO)
    webui.shared.opts.set("rocm_sd_operations", ["Attention", "VAE decode", "VAE encode"])
    result = webui.txt2img(*AUTO)
    assert untouched(webui) and "ROCm SD UNet" not in result.info
    assert 'ROCm SD: "Auto, attention: rocm_sd"' in result.info


@pytest.mark.parametrize("unet", ["Off", "Auto"])
def test_infotext_round_trip(start: Start, gpu: FakeGpu, unet: str) -> None:
    webui = begin(start, gpu)
    info = webui.txt2img(True, "Auto", "Off", 0, unet).info
    for tab in ("txt2img", "img2img"):
        controls = getattr(webui.scripts, f"scripts_{tab}").script("ROCm SD Optimization").controls
        updates = webui.paste(tab, info)
        assert value_of(updates[controls[4]]) == unet
    older = 'a cat\nSteps: 3, Seed: 1, ROCm SD: "Auto, attention: rocm_sd"'
    controls = webui.scripts.scripts_txt2img.script("ROCm SD Optimization").controls
    kept = webui.paste("txt2img", older).get(controls[4])
    assert kept is None or value_of(kept) is None


def test_api(start: Start, gpu: FakeGpu) -> None:
    webui = begin(start, gpu)

    def info(*args: Any) -> str:
        return webui.by_api({"rocm sd optimization": {"args": list(args)}})

    known = webui.library("hosts.ui.options").UNET_DEFAULT
    saved = info(True, "Auto", "Off", 0)  # as it was before there was a fifth
    assert f"{BLOCKS} of {BLOCKS} blocks" in saved if known == "Auto" else "UNet: off" in saved
    assert f"{BLOCKS} of {BLOCKS} blocks" in info(True, "Auto", "Off", 0, "auto")
    assert "ROCm SD UNet: off" in info(True, "Auto", "Off", 0, "off")
    assert "ROCm SD UNet" not in info(False, "Auto", "Off", 0, "Auto")
