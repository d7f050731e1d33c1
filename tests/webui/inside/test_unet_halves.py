"""The UNet's blocks in half precision beside the WebUI's own UNet in float32.

Runs in a real WebUI, too, which has no half precision on a CPU but where all of it is ours.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import FakeGpu, Start, WebUI
from unet_help import AUTO, blocks_shown, bytes_of, called, ours, steps_of, unet_of, untouched
from vae_help import distance, same

FIELDS = {"steps": 2}
NEAR = 0.2
"""Of two steps in bfloat16 with random weights, the furthest value; of another seed it is twice as
far at the least.
"""


@pytest.fixture
def gpu() -> FakeGpu:
    made = FakeGpu()
    made.norms = True
    return made


def in_half(webui: WebUI) -> None:
    """As where the WebUI has loaded its UNet so."""
    unet_of(webui).to(torch.bfloat16)
    unet_of(webui).dtype = webui.devices.dtype_unet = torch.bfloat16
    webui.script_callbacks.model_loaded_callback(webui.shared.sd_model)


@pytest.mark.parametrize("family", ["ldm", "sgm"])
def test_blocks(start: Start, gpu: FakeGpu, monkeypatch: Any, family: str) -> None:
    webui = start(gpu=gpu, family=family, whole=True)
    seen = steps_of(webui, monkeypatch)
    expected = webui.txt2img(False, **FIELDS)
    assert distance(webui.txt2img(False, seed=2, **FIELDS), expected) > 2 * NEAR
    single = webui.txt2img(*AUTO, **FIELDS)
    assert untouched(webui) and not seen
    assert 'ROCm SD UNet: "Auto, left to the WebUI"' in single.info
    said = {text.partition(": ")[2] for row in blocks_shown(webui) for text in row.why}
    flags = webui.shared.cmd_opts
    flag = " by --no-half" if getattr(flags, "no_half", False) else ""
    assert said == {f"its weights are float32{flag}"}

    in_half(webui)
    before = bytes_of(webui)
    on = webui.txt2img(*AUTO, **FIELDS)
    total, each = ours(webui), called(webui)
    assert total >= 13 and len(seen) in (2 * each, 2 * total), on.info
    assert f'ROCm SD UNet: "Auto, {total} of {total} blocks' in on.info
    assert distance(on, expected) < NEAR
    hires = webui.txt2img(*AUTO, enable_hr=True, width=72, height=56, **FIELDS)
    assert len(seen) >= 5 * each and hires.images[0].size[0] > 72
    webui.library("hosts.webui.unet").session.end()
    assert untouched(webui) and bytes_of(webui) == before

    unet_of(webui).float()
    unet_of(webui).dtype = webui.devices.dtype_unet = torch.float32
    again = webui.txt2img(False, **FIELDS)
    assert distance(again, expected) < NEAR and not same(again, on)
    assert not webui.errors_reported
