"""Transformers' blocks other than SD 3's: ours in one clone's calls, else ComfyUI's to the bit."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib_rocm_sd.hosts.comfyui.host import tally
from lib_rocm_sd.hosts.comfyui.model import optimized
from lib_rocm_sd.hosts.read.unet import transformer_kind
from lib_rocm_sd.modules import compared
from lib_rocm_sd.modules.stand_in import UnknownModuleError
from tests.comfyui.unet_steps import counts, forwards, model_of, near, step

ALL = {"joint transformer block": 2, "single transformer block": 3}
COUNTS = {
    "Qwen-Image": {"joint transformer block": 3},
    "PixArt": {"transformer block": 3},
    "Wan": {"transformer block": 3},
}
CLASSES = {
    "Flux": "comfy.ldm.flux.model.Flux",
    "Chroma": "comfy.ldm.chroma.model.Chroma",
    "Qwen-Image": "comfy.ldm.qwen_image.model.QwenImageTransformer2DModel",
    "PixArt": "comfy.ldm.pixart.pixartms.PixArtMS",
    "Wan": "comfy.ldm.wan.model.WanModel",
}


def transformer_of(comfy: Any, name: str = "Flux", **config: Any) -> Any:
    module, _, kind = CLASSES[name].rpartition(".")
    kinds = SimpleNamespace(UNetModel=getattr(importlib.import_module(module), kind))
    return model_of(SimpleNamespace(**{**vars(comfy), "unet": kinds}), **config)


def left() -> dict[str, int]:
    found: dict[str, int] = {}
    for row in importlib.import_module("lib_rocm_sd.hosts.comfyui.unet").rows():
        found |= row.left
    return found


@pytest.mark.parametrize(
    ("name", "config"),
    [("Flux", {}), ("Flux", {"flipped": True}), *((name, {}) for name in ("Chroma", *COUNTS))],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_blocks_are_ours_in_the_clone_alone(
    comfy: Any, blocks: None, dtype: torch.dtype, name: str, config: dict[str, Any]
) -> None:
    model = transformer_of(comfy, name, dtype=dtype, **config)
    theirs = step(model)
    clone = optimized(model, "Auto", attention=True, unet=True)
    for _ in range(2):
        assert near(step(clone), theirs)
        assert counts() == COUNTS.get(name, ALL)
        assert tally.ours.pop("UNet") == 1
        assert torch.equal(step(model), theirs) and not forwards(model)
    assert not tally.left


@pytest.mark.parametrize("name", ["Flux", "Chroma"])
def test_what_comfyui_adds_in_place_is_compared_all_the_same(
    comfy: Any, blocks: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv(compared.VARIABLE, raising=False)
    clone = optimized(transformer_of(comfy, name), "Auto", attention=True, unet=True)
    norms, seen = compared.norms, []

    def watched(ours: torch.Tensor, theirs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        made = norms(ours, theirs, x)
        seen.append(made.tolist())
        return made

    monkeypatch.setattr("lib_rocm_sd.unet.spot.norms", watched)
    for _ in range(4):
        step(clone)
    assert len(seen) == 3 and all(added > 0 for _, added, _ in seen)
    assert not left()


def test_what_differs_is_comfyuis_and_is_said(comfy: Any, blocks: None) -> None:
    model = transformer_of(comfy)
    clone = optimized(model, "Auto", attention=True, unet=True)
    flux = model.model.diffusion_model
    flux.double_blocks[0].txt_mlp[1] = torch.nn.GELU()
    flux.single_blocks[1].norm.key_norm.register_forward_hook(lambda *given: None)
    theirs = step(model)
    assert near(step(clone), theirs)
    assert left() == {
        "txt_mlp.1.approximate is none": 1,
        "norm.key_norm has forward hooks": 1,
    }


def test_what_a_block_is_given_beside_is_comfyuis_and_is_said(comfy: Any, blocks: None) -> None:
    """Lengths of PixArt's prompts are for its attention, and a time embedding of each token."""
    for name, given, why in (
        ("PixArt", {"mask": [7]}, "its prompts have lengths"),
        ("Wan", {"e": torch.zeros(1, 64, 6, 48)}, "its tokens have time embeddings of their own"),
    ):
        module, _, _ = CLASSES[name].rpartition(".")
        block = transformer_of(comfy, name).model.diffusion_model.blocks[0]
        kind = transformer_kind(block)
        assert kind is not None and module == type(block).__module__
        x = torch.zeros(1, 64, 48, dtype=torch.bfloat16)
        call = (
            {"y": x, "t": x[:, :6].flatten(1)}
            if name == "PixArt"
            else {"freqs": None, "context": x}
        )
        with pytest.raises(UnknownModuleError, match=why):
            kind.bind(block, x, **{**call, **given})


def test_a_mask_is_comfyuis(comfy: Any, blocks: None) -> None:
    model = transformer_of(comfy)
    clone = optimized(model, "Auto", attention=True, unet=True)
    step(clone, attention_mask=torch.zeros(2, 1, 71, 71, dtype=torch.bfloat16))
    assert left() == {"its attention has a mask": 3}


def test_a_scale_that_is_replaced_counts(comfy: Any, blocks: None) -> None:
    """The weights of these norms have another name than those of all others."""
    model = transformer_of(comfy)
    clone = optimized(model, "Auto", attention=True, unet=True)
    for _ in range(3):
        step(clone)
    norm = model.model.diffusion_model.single_blocks[0].norm.query_norm
    with torch.inference_mode():
        norm.scale = torch.nn.Parameter(norm.scale * 3, requires_grad=False)
    assert near(step(clone), step(model))
