"""Pictures of a Forge with this extension, without it, and with it off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import FakeGpu
from forge_help import distance, same
from PIL import Image

FIELDS: dict[str, dict[str, Any]] = {
    "forge": {"batch_size": 2, "n_iter": 2, "steps": 2},
    "reforge": {"enable_hr": True, "refiner_checkpoint": "model-7", "steps": 2},
}
PICTURE = Image.radial_gradient("L").resize((64, 64)).convert("RGB")


@pytest.fixture(autouse=True)
def convolutions(gpu: FakeGpu) -> None:
    gpu.convs = True


def test_on_and_off(forge: Any, gpu: FakeGpu) -> None:
    fields = FIELDS[forge.kind]
    expected = forge(extension=False).txt2img(**fields)
    webui = forge(gpu=gpu)
    tested = len(gpu.seen)

    assert same(webui.txt2img(False, **fields), expected)
    assert len(gpu.seen) == tested

    on = webui.txt2img(True, **fields)
    assert len(gpu.seen) >= tested + 4
    assert 'ROCm SD: "Auto, attention: rocm_sd"' in on.info
    assert 'ROCm SD VAE: "Auto, whole frame, conv: torch"' in on.info
    assert 'ROCm SD UNet: "Auto, left to the WebUI"' in on.info  # it has attention alone
    assert 0 < distance(on, expected) < 0.05

    used = len(gpu.seen)
    off = webui.txt2img(False, **fields)
    assert same(off, expected) and "ROCm SD: off" in off.info
    assert len(gpu.seen) == used
    assert not webui.errors_reported and not webui.errors.recorded


def test_off_gives_back_what_was_there(forge: Any, gpu: FakeGpu) -> None:
    webui = forge(gpu=gpu)
    vae = webui.shared.sd_model.forge_objects.vae
    estimates = (vae.memory_used_decode, vae.memory_used_encode)
    assert "forward" not in vars(vae.first_stage_model.decoder)

    on = forge.bindings()
    ours = {place for place, value in on.items() if type(value).__name__ == "Function"}
    assert {f"{forge.home.__name__}.{name}" for name in forge.names} <= ours
    if forge.kind == "forge":
        assert {"backend.nn.unet.attention_function", "backend.nn.flux.attention_function"} <= ours
        assert "backend.nn.t5.attention_function" not in ours

    def theirs() -> dict[str, Any]:
        return {place: getattr(value, "theirs", value) for place, value in on.items()}

    def left() -> bool:
        now = forge.bindings()
        return now.keys() == on.keys() and all(now[key] is value for key, value in theirs().items())

    assert not left()
    seen: list[bool] = []
    webui.script_callbacks.on_cfg_denoiser(lambda params: seen.append(left()))
    webui.txt2img(False)
    assert seen == [True] * 3
    webui.txt2img(True)
    assert not any(seen[3:])
    assert (vae.memory_used_decode, vae.memory_used_encode) == estimates
    assert "forward" not in vars(vae.first_stage_model.decoder)
    webui.script_callbacks.script_unloaded_callback()
    assert left()


def test_img2img_encodes_with_ours(forge: Any, gpu: FakeGpu) -> None:
    webui = forge(gpu=gpu)
    torch.manual_seed(0)
    off = webui.img2img(False, init_images=[PICTURE])
    torch.manual_seed(0)
    on = webui.img2img(True, "Auto", "Always banded", init_images=[PICTURE])
    rows = [row for row in webui.library("report").snapshot()["rows"] if row["family"] == "conv"]
    assert {row["part"] for row in rows} == {"VAE decode", "VAE encode"}
    assert 0 < distance(on, off) < 0.3


def test_weights_in_float32_are_forges(forge: Any, gpu: FakeGpu) -> None:
    expected = forge(torch.float32, extension=False).txt2img()
    webui = forge(torch.float32, gpu=gpu)
    result = webui.txt2img(True)
    assert same(result, expected)
    calls = 7 if forge.kind == "forge" else 6  # Forge's VAE, too, asks for a function
    assert f"left to the WebUI: {calls} calls" in result.info
    assert "with --vae-in-fp16 it can be ours" in result.comments
    events = webui.library("report").snapshot()["events"]
    left = "a call was left to the WebUI's own attention: it is in float32"
    assert any(event.startswith(left) for event in events)


def test_an_error_of_ours_costs_no_picture(forge: Any, gpu: FakeGpu, monkeypatch: Any) -> None:
    expected = forge(extension=False).txt2img()
    webui = forge(gpu=gpu)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(webui.library("hosts.attention").engine, "route", fails)
    monkeypatch.setattr(webui.library("vae.program").Program, "__call__", fails)
    for _ in range(2):
        assert same(webui.txt2img(True), expected)
    events = webui.library("report").snapshot()["events"]
    assert sum("planted" in event for event in events) == 2  # attention's, and the decoder's


def test_out_of_memory_becomes_forges_tiles(forge: Any, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = forge(gpu=gpu)
    program = webui.library("vae.program").Program
    whole, sizes = program.__call__, []

    def short(self: Any, image: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        sizes.append(image.shape)
        if len(sizes) == 1:
            raise RuntimeError("HIP error: out of memory")
        return whole(self, image, **kwargs)  # type: ignore[no-any-return]

    monkeypatch.setattr(program, "__call__", short)
    size = 160  # a real Forge's tiles have to be wider than what of them is blended
    assert webui.txt2img(True, width=size, height=size, steps=1).images
    assert len(sizes) > 1 and not webui.errors_reported


def test_what_a_decode_takes_is_told(forge: Any, gpu: FakeGpu) -> None:
    webui = forge(gpu=gpu)
    vae = webui.shared.sd_model.forge_objects.vae
    shape, bands = (1, 4, 64, 64), []
    own = vae.memory_used_decode(shape, torch.bfloat16)
    seen: list[float] = []

    def note(self: Any, p: Any, *args: Any, **kwargs: Any) -> None:
        seen.append(vae.memory_used_decode(shape, torch.bfloat16))
        bands.append(vae.memory_used_decode((1, 4, 2, 64, 64), torch.bfloat16))

    kind = type("Other", (webui.scripts.Script,), {"post_sample": note})
    other = kind()
    other.args_from = other.args_to = 0
    webui.scripts.scripts_txt2img.alwayson_scripts.append(other)
    for args in ((False,), (True,), (True, "Memory"), (True, "Auto", "Off")):
        webui.txt2img(*args)
    off, auto, memory, vae_off = seen
    assert off == vae_off == own
    assert 0 < memory < auto < own
    assert len(set(bands)) == 1  # of a video nothing is known here


def test_packed_weights_stay_where_forge_leaves_models(forge: Any, gpu: FakeGpu) -> None:
    webui = forge(gpu=gpu)
    session = webui.library("hosts.webui.vae").session

    def kept() -> list[bool]:
        return [bool(coder._program and coder._program._ready) for coder in session._all()]

    webui.txt2img(True)
    assert kept() == [False, False]
    forge.arguments.always_gpu = True
    webui.txt2img(True)
    assert any(kept())


def test_the_status_says_what_the_vae_itself_is_in(forge: Any, gpu: FakeGpu) -> None:
    """Forges choose by its model; what modules/devices.py has is chosen without one."""
    webui = forge(gpu=gpu)
    webui.devices.dtype_vae = torch.float32
    assert "whole frame" in webui.txt2img(True, steps=1).info
    assert "The VAE runs on our kernels." in webui.status
    webui.devices.dtype_vae = torch.bfloat16
    webui.shared.sd_model.forge_objects.vae.vae_dtype = torch.float32
    assert "The WebUI's own code runs the VAE: its weights are float32" in webui.status


CHANGED = {
    "forge": {"parameters_manual_cast": True, "forge_online_loras": {"weight": []}},
    "reforge": {"ldm_patched_cast_weights": True},
}
"""What layers have whose weights are not what is computed with, as they lie."""


def test_a_vae_whose_weights_are_not_its_own_is_forges(forge: Any, gpu: FakeGpu) -> None:
    webui = forge(gpu=gpu)
    expected = webui.txt2img(True, "Auto", "Off", steps=1)
    conv = webui.shared.sd_model.forge_objects.vae.first_stage_model.decoder.conv_in
    for name, value in CHANGED[forge.kind].items():
        before = vars(conv).get(name)
        setattr(conv, name, value)
        result = webui.txt2img(True, steps=1)
        assert same(result, expected) and 'ROCm SD VAE: "Auto, left to the WebUI"' in result.info
        assert "weights" in webui.status and "each call" in webui.status
        if before is None:
            delattr(conv, name)
        else:
            setattr(conv, name, before)
    assert "whole frame" in webui.txt2img(True, steps=1).info


def test_the_device_is_asked_of_forge_where_nobody_else_knows(forge: Any) -> None:
    webui = forge(cuda=False)
    del webui.devices.device, webui.shared.device
    assert webui.library("hosts.webui.host").device() == torch.device("cpu")
    assert webui.library("hosts.webui.host").device() == torch.device("cpu")
