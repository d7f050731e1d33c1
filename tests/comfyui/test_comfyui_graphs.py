"""UNet blocks in ComfyUI, recorded: a CPU plays the device that replays them, in inference mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib_rocm_sd.hosts.comfyui import unet as ours
from lib_rocm_sd.hosts.comfyui.model import optimized
from tests.comfyui.unet_steps import lora, model_of, near, step
from tests.graph_tape import recording_cpu
from tests.unet.unet_models import draw


def steps(model: Any, count: int = 4) -> list[torch.Tensor]:
    return [step(model, draw(2, 4, 8, 8, seed=n)) for n in range(count)]


def test_recorded_blocks_give_what_launched_ones_give(
    comfy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "unusable", lambda device: [])
    model = model_of(comfy)
    clone = optimized(model, "Auto", attention=True, unet=True)
    launched, theirs = steps(clone), steps(model)
    desk = recording_cpu(monkeypatch)
    made = steps(clone)
    assert all(map(torch.equal, made, launched))
    count = desk.recorded
    assert count and desk.replayed
    assert all(map(torch.equal, steps(model), theirs))
    added = model.clone()
    added.add_patches(lora(model))
    expected = steps(added)
    assert all(map(near, steps(optimized(added, "Auto", attention=True, unet=True)), expected))
    assert desk.recorded > count
    assert all(map(torch.equal, steps(clone), launched))
    assert all(map(torch.equal, steps(model), theirs))
