"""SD 3's blocks: ours in the calls of one clone, ComfyUI's to the bit in all others."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib_rocm_sd.hosts.comfyui.host import tally
from lib_rocm_sd.hosts.comfyui.model import optimized
from tests.comfyui.unet_steps import counts, forwards, model_of, near, step, with_ours

KINDS: dict[str, dict[str, Any]] = {
    "SD 3": {},
    "SD 3.5 large": {"qk_norm": "rms"},
    "SD 3.5 medium": {"qk_norm": "rms", "x_block_self_attn_layers": [0]},
}


def transformer_of(comfy: Any, kind: str) -> Any:
    mmdit = importlib.import_module("comfy.ldm.modules.diffusionmodules.mmdit")
    kinds = SimpleNamespace(UNetModel=mmdit.OpenAISignatureMMDITWrapper)
    return model_of(SimpleNamespace(**{**vars(comfy), "unet": kinds}), **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_all_blocks_are_ours_in_the_clone_alone(comfy: Any, blocks: None, kind: str) -> None:
    model = transformer_of(comfy, kind)
    theirs = step(model)
    clone = optimized(model, "Auto", attention=True, unet=True)
    for _ in range(2):
        assert near(step(clone), theirs)
        assert counts() == {"joint transformer block": 3} and tally.ours.pop("UNet") == 1
        assert torch.equal(step(model), theirs) and not forwards(model)
    assert not tally.left


def test_without_our_attention_they_are_comfyuis(comfy: Any, blocks: None) -> None:
    model = transformer_of(comfy, "SD 3.5 medium")
    theirs = step(model)
    assert torch.equal(step(with_ours(model)), theirs)
    (row,) = importlib.import_module("lib_rocm_sd.hosts.comfyui.unet").rows()
    assert row.left == {"attention is ComfyUI's": 3}


def test_what_differs_is_comfyuis_and_is_said(comfy: Any, blocks: None) -> None:
    model = transformer_of(comfy, "SD 3")
    clone = optimized(model, "Auto", attention=True, unet=True)
    model.model.diffusion_model.joint_blocks[0].x_block.mlp.act = torch.nn.GELU()
    theirs = step(model)
    assert near(step(clone), theirs)
    (row,) = importlib.import_module("lib_rocm_sd.hosts.comfyui.unet").rows()
    assert row.ours == 2 and row.left == {"x_block.mlp.act.approximate is none": 1}
