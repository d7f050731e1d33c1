"""The speed test of the UNet's blocks in the WebUI: one step, and whole pictures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import unet_help
from conftest import FakeGpu, Start, WebUI
from speed_help import Test, reasons


@pytest.fixture
def gpu() -> FakeGpu:
    made = FakeGpu()
    made.convs = made.norms = True
    return made


@pytest.fixture
def blocks(start: Start, gpu: FakeGpu) -> WebUI:
    return start(gpu=gpu, dtype=torch.bfloat16, whole=True)


def test_a_step_with_and_without_the_blocks(blocks: WebUI, gpu: FakeGpu, monkeypatch: Any) -> None:
    seen = unet_help.steps_of(blocks, monkeypatch)
    before, used = unet_help.bytes_of(blocks), len(gpu.seen)
    test = Test(blocks)
    document = test.run("step")
    off, on = document["rows"]
    assert (off["method"], on["method"]) == ("extension off", "rocm_sd")
    assert not off["reason"] and not on["reason"]
    assert off["error"] == 0 and 0 < on["error"] < 0.3
    steps = seen.count("downsampling")
    assert len(seen) == unet_help.CALLED * steps and steps >= 6
    ours = [q for q, *_ in gpu.seen[used:] if q.shape[2] == 2]  # self-tests have one head
    assert len(ours) == 6 * steps  # a WebUI's own step has none of them
    assert unet_help.untouched(blocks) and unet_help.bytes_of(blocks) == before
    assert blocks.is_ours()
    assert "Denoising step" in test.view.state("").content.results


@pytest.mark.parametrize("family", ["ldm", "sgm"])
def test_a_step_is_as_the_sampler_asks_for_it(start: Start, gpu: FakeGpu, family: str) -> None:
    webui = start(gpu=gpu, family=family, dtype=torch.bfloat16, whole=True)
    unet = unet_help.unet_of(webui)
    if family == "sgm":  # what SDXL is told of the picture
        unet.num_classes = "sequential"
        unet.label_emb = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(48, 128)))
    side = Test(webui).side
    with side.queue():
        denoiser = side.unet()
        (x, times), more = denoiser.arguments(72)
        assert x.shape == (2, 4, 9, 9) and times.shape == (2,) and x.dtype is torch.bfloat16
        assert more["context"].shape == (2, 77, 24)
        assert [more["y"].shape] == [(2, 48)] if family == "sgm" else "y" not in more
        assert denoiser.call(x, times, **more).shape == x.shape


def test_pictures_with_the_blocks(blocks: WebUI, monkeypatch: Any) -> None:
    seen = unet_help.steps_of(blocks, monkeypatch)
    test = Test(blocks)
    document = test.run("image")
    assert reasons(document) == [""] * 6
    first, second = test.session.shots(document["id"])
    assert second.case == f"{first.case}, UNet" and seen
    assert unet_help.untouched(blocks)
    assert second.largest < 60  # of bfloat16 and random weights


def test_a_unet_that_nobody_knows(blocks: WebUI) -> None:
    blocks.shared.sd_model.model.diffusion_model = torch.nn.Linear(2, 2)
    found = reasons(Test(blocks).run("step"))
    assert found == ["we do not know how to call this checkpoint's UNet"]


def test_a_unet_elsewhere_is_moved_and_moved_back(blocks: WebUI, monkeypatch: Any) -> None:
    side = Test(blocks).side
    unet, moves = unet_help.unet_of(blocks), []
    unet.to = lambda device: moves.append(torch.device(device).type)
    monkeypatch.setattr(type(side), "device", torch.device("meta"))
    with side.queue():
        side.unet()
        assert moves == ["meta"]
    assert moves == ["meta", "cpu"]
    blocks.shared.cmd_opts.lowvram = True
    with side.queue():
        side.unet()
    assert len(moves) == 2
