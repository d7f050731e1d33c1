"""What a Forge's page, status and speed test say; and Forges that are not as known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accordion_help import TITLE, refresh
from conftest import FakeGpu
from forge_help import same

ONE = pytest.mark.parametrize("forge", ["forge"], indirect=True)
"""Of the kinds one is enough."""


@ONE
def test_status_and_speed_test(forge: Any, gpu: FakeGpu) -> None:
    gpu.convs = gpu.norms = True
    webui = forge(gpu=gpu, whole=True)
    label, _, status = refresh(webui)
    assert label.startswith(f"{TITLE}: Auto · attention on gfx1100 · UNet ready · VAE")
    assert "our kernel (gfx1100)" in status
    webui.txt2img(True, "Auto", "Auto", 0, "Auto")
    label, _, status = refresh(webui, True, "Auto", "Auto", 0, "Auto")
    assert label == f"{TITLE}: Auto · attention on gfx1100 · UNet · VAE whole frame"
    assert "UNet, transformer block" in status

    public = webui.library("hosts.webui.public").status()
    assert public["attention"]["in_use"] and public["attention"]["chosen"] == "ROCm SD"
    blocks = public["unet"]["blocks"]
    assert blocks and all(row["ours"] == row["total"] > 0 for row in blocks)
    assert public["unet"]["usable"] is not False and not public["unet"]["trouble"]

    side = webui.library("hosts.webui.speedtest").side
    ((name, method),) = side.attention_methods().items()
    theirs = getattr(forge.home, forge.names[0]).theirs
    assert name == theirs.__name__.removeprefix("attention_")
    q, k, v = (torch.randn(2, 9, 2, 16) for _ in range(3))
    used = len(gpu.seen)
    torch.testing.assert_close(method(q, k, v), theirs(*(t.flatten(2) for t in (q, k, v)), 2))
    assert len(gpu.seen) == used
    assert side.vae() is webui.shared.sd_model.forge_objects.vae.first_stage_model.decoder
    steps = side.unet()
    args, kwargs = steps.arguments(64)
    with torch.inference_mode():
        with steps.theirs():
            expected = steps.call(*args, **kwargs)
        with steps.ours():
            made = steps.call(*args, **kwargs)
    assert steps.dtype == "bfloat16" and 0 < (made - expected).abs().max() < 0.2
    with side.queue():
        wish = webui.library("lab.speed_job").PictureWish
        pictures = [
            side.image(wish(2, 64, on, False, lambda done: None, lambda: False))
            for on in (False, True)
        ]
    assert all(picture.it_per_s > 0 for picture in pictures)
    assert not webui.errors_reported


@ONE
def test_settings_exclude_attention(forge: Any, gpu: FakeGpu) -> None:
    expected = forge(extension=False).txt2img()
    webui = forge(gpu=gpu)
    webui.shared.opts.set("rocm_sd_operations", ["VAE encode"])
    assert type(getattr(forge.home, forge.names[0])).__name__ == "function"
    assert same(webui.txt2img(True), expected)
    assert "excludes attention" in refresh(webui)[2]
    webui.shared.opts.set("rocm_sd_operations", ["Attention"])
    assert type(getattr(forge.home, forge.names[0])).__name__ == "Function"


@ONE
def test_after_reload_ui_it_is_ours_again(forge: Any, gpu: FakeGpu) -> None:
    webui = forge(gpu=gpu)
    theirs = getattr(forge.home, forge.names[0]).theirs
    webui.initialize.reload_ui()
    assert getattr(forge.home, forge.names[0]).theirs is theirs
    assert "attention: rocm_sd" in webui.txt2img(True).info


@ONE
def test_on_a_cpu_nothing_is_touched(forge: Any, capsys: Any) -> None:
    expected = forge(extension=False).txt2img()
    webui = forge(cuda=False)
    assert not any(type(value).__name__ == "Function" for value in forge.bindings().values())
    result = webui.txt2img(True)
    assert same(result, expected) and "ROCm SD" not in result.info
    label, _, status = refresh(webui)
    assert label == f"{TITLE}: not active, no supported GPU" and "this is the CPU" in status
    assert capsys.readouterr().out.count("not used on this machine: no GPU") == 1
    assert not webui.errors_reported


@ONE
def test_kernels_that_are_wrong_are_not_used(forge: Any, gpu: FakeGpu) -> None:
    gpu.wrong = True
    expected = forge(extension=False).txt2img()
    webui = forge(gpu=gpu)
    assert same(webui.txt2img(True), expected)
    assert not any(type(value).__name__ == "Function" for value in forge.bindings().values())
    assert "self-test failed" in refresh(webui)[2]


@ONE
def test_while_kernels_are_tried_it_is_forges(forge: Any, gpu: FakeGpu) -> None:
    expected = forge(extension=False).txt2img()
    webui = forge(gpu=gpu)
    seam = webui.ours
    seam.waits = True
    seam._refresh()
    assert same(webui.txt2img(True), expected)
    seam.settle()
    assert "attention: rocm_sd" in webui.txt2img(True).info


def test_a_forge_that_is_not_as_known(forge: Any, gpu: FakeGpu) -> None:
    renamed = forge.names[0]

    def strange(webui: Any) -> None:
        webui.sd_models.load_model()  # with what the double needs
        delattr(forge.home, renamed)

    webui = forge(gpu=gpu, before=strange)
    assert webui.ours is None
    label, _, status = refresh(webui)
    assert label == f"{TITLE}: not active in this WebUI"
    assert f"its {forge.home.__name__} has no {renamed}" in status


def test_another_has_taken_the_place(forge: Any, gpu: FakeGpu) -> None:
    def take(webui: Any) -> None:
        for name in forge.names:
            setattr(forge.home, name, lambda *args, **kwargs: 1 // 0)

    webui = forge(gpu=gpu, before=take)
    assert "has replaced" in webui.status and forge.home.__name__ in webui.status
    taken = getattr(forge.home, forge.names[0])
    webui.shared.opts.set("rocm_sd_operations", [])
    assert getattr(forge.home, forge.names[0]) is taken
