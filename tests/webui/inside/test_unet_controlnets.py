"""ControlNets of an extension: their blocks are ours as the UNet's are, and go back with them."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import FakeGpu, Start, WebUI
from torch import nn
from unet_help import AUTO, WITHOUT, begin, blocks_shown, session_of, unet_of
from vae_help import HALF, add_script, distance, same

BLOCKS = 12
"""The double's ControlNet's, five of which make its results."""
NEAR = 0.12


@pytest.fixture
def gpu() -> FakeGpu:
    made = FakeGpu()
    made.norms = True
    return made


def controlnet() -> Any:
    """As sd-webui-controlnet's: the first half of ldm's UNet, and 1x1 convolutions."""
    from ldm.modules.diffusionmodules import openaimodel  # type: ignore[import-not-found]

    class ControlNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            own = openaimodel.UNetModel()
            self.time_embed, self.input_blocks = own.time_embed, own.input_blocks
            self.middle_block = own.middle_block
            one = openaimodel.TimestepEmbedSequential
            self.zero_convs = nn.ModuleList(one(nn.Conv2d(c, c, 1)) for c in (32, 32, 32, 64))
            self.middle_block_out = one(nn.Conv2d(64, 64, 1))

        def forward(self, x: Any, timesteps: Any, context: Any) -> list[Any]:
            times = openaimodel.timestep_embedding(timesteps, 32)
            emb, made = self.time_embed(times.to(x.dtype)), []
            for block, result in zip(self.input_blocks, self.zero_convs, strict=True):
                x = block(x, emb, context)
                made.append(result(x, emb, context))
            return [*made, self.middle_block_out(self.middle_block(x, emb, context), emb)]

    torch.manual_seed(3)
    return ControlNet().to(HALF).eval().requires_grad_(False)


class Extension:
    """Its script: in a picture the UNet's forward is one that calls `model` first."""

    def __init__(self, webui: WebUI, model: Any) -> None:
        self.model, self.unet = model, unet_of(webui)
        self.script = add_script(webui, process=self.process, postprocess=self.postprocess)

    def process(self, p: Any, *args: Any) -> None:
        if self.model is None:
            return
        units = [SimpleNamespace(control_model=SimpleNamespace(control_model=self.model))]
        self.script.latest_network = SimpleNamespace(control_params=units)
        own = self.unet.forward

        def forward(x: Any, timesteps: Any = None, context: Any = None, **more: Any) -> Any:
            results = self.model(x, timesteps, context)
            return own(x, timesteps, context, **more) + 3 * results[1][:, :4]

        self.unet.forward = forward

    def postprocess(self, p: Any, *args: Any) -> None:
        self.script.latest_network = None
        self.unet.__dict__.pop("forward", None)


def ours(model: Any) -> int:
    forwards = [vars(module).get("forward") for module in model.modules()]
    return sum(type(each).__module__.startswith("lib_rocm_sd.") for each in forwards)


def test_on_and_off(start: Start, gpu: FakeGpu) -> None:
    webui = begin(start, gpu)
    plain = webui.txt2img(*WITHOUT)
    model = controlnet()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    Extension(webui, model)
    expected = webui.txt2img(*WITHOUT)
    assert not ours(model) and distance(expected, plain) > NEAR
    on = webui.txt2img(*AUTO)
    assert ours(model) == BLOCKS and distance(on, expected) < NEAR and not same(on, expected)
    shown = next(row for row in rows(webui) if row.operation == "ControlNet")
    assert (shown.runs, shown.why) == (f"{BLOCKS} of {BLOCKS} are ours", ())
    assert same(webui.txt2img(*WITHOUT), expected)
    assert not any("forward" in vars(module) for module in model.modules())
    left = model.state_dict()
    assert all(torch.equal(left[key], value) for key, value in weights.items())
    assert all(left[key].stride() == value.stride() for key, value in weights.items())
    assert not webui.errors_reported


def rows(webui: WebUI) -> Any:
    options = webui.library("hosts.ui.options").Options(unet="Auto")
    return webui.library("hosts.webui.status").look(options).rows


def test_one_that_no_picture_wants_is_given_back(start: Start, gpu: FakeGpu) -> None:
    webui = begin(start, gpu)
    model = controlnet()
    extension = Extension(webui, model)
    webui.txt2img(*AUTO)
    extension.model = None
    webui.txt2img(*AUTO)  # it may be wanted until this one has ended
    webui.txt2img(*AUTO)
    assert not ours(model) and not session_of(webui).controlnets


def test_one_that_the_extension_drops_is_not_kept(start: Start, gpu: FakeGpu) -> None:
    webui = begin(start, gpu)
    extension = Extension(webui, controlnet())
    webui.txt2img(*AUTO)
    assert session_of(webui).controlnets
    extension.model = None
    gc.collect()
    assert blocks_shown(webui) and not session_of(webui).controlnets


def test_what_fails_in_it_is_the_webuis(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = begin(start, gpu)
    Extension(webui, controlnet())
    expected = webui.txt2img(*WITHOUT)

    def fails(*given: Any) -> None:
        raise RuntimeError("planted")

    held = webui.library("hosts.webui.controlnets").ControlNets
    monkeypatch.setattr(held, "hold", fails)
    assert distance(webui.txt2img(*AUTO), expected) < NEAR
    assert not session_of(webui).controlnets and session_of(webui).rows
