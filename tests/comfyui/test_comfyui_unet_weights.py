"""UNet blocks and their weights: what ComfyUI merges into them, and layers that make them anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib_rocm_sd.hosts import strides as strides_of
from lib_rocm_sd.hosts.comfyui import unet as ours
from lib_rocm_sd.unet import weights
from tests.comfyui.conftest import left
from tests.comfyui.unet_steps import (
    TOTALS,
    counts,
    forwards,
    lora,
    model_of,
    near,
    step,
    strides,
    with_ours,
)
from tests.unet.unet_models import draw, errors


def test_a_lora_in_the_weights_is_heeded(model: Any, blocks: None) -> None:
    theirs, added = step(model), model.clone()
    added.add_patches(lora(model))
    other = step(added)
    assert not near(other, theirs)
    for one, expected in ((model, theirs), (added, other), (model, theirs)):
        assert near(step(with_ours(one)), expected)


def test_weights_that_were_put_aside_lie_as_before_too(model: Any, blocks: None) -> None:
    """ComfyUI puts a LoRA's backup back when nothing of ours is there any more."""
    theirs, before, added = step(model), strides(model), model.clone()
    added.add_patches(lora(model))
    other = step(added)
    step(with_ours(model))
    clone = with_ours(added)
    step(clone)
    assert torch.equal(step(added), other)
    assert torch.equal(step(model), theirs) and strides(model) == before


def test_weights_that_cannot_be_laid_as_before_fail_nothing(
    model: Any, blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their values are right; what is short of memory is told."""
    theirs = step(model)
    step(with_ours(model))

    def fails(*args: Any) -> None:
        raise torch.cuda.OutOfMemoryError("out of memory")

    for owner in (weights, strides_of):
        monkeypatch.setattr(owner, "restride", fails)
    assert errors(step(model), theirs)[0] < 0.04 and not forwards(model)
    assert any("its weights lie otherwise than before" in why for why in left())


def test_a_comfyui_that_does_not_name_its_patches_is_not_trusted() -> None:
    assert ours.weights_of(object()) is None


def test_values_that_changed_in_place_are_read(model: Any, blocks: None) -> None:
    """As ComfyUI's hooks of weights do it: it says so by its hooks, or by its patches' name."""
    clone, block = with_ours(model), model.model.diffusion_model.middle_block[0]
    step(clone)
    for change in ("hooks", "uuid"):
        with torch.inference_mode():
            for layer in (block.out_layers[3], block.emb_layers[1]):
                layer.bias.data.add_(8 * draw(*layer.bias.shape))
        if change == "hooks":
            clone.current_hooks = object()
        else:
            clone.current_hooks, model.model.current_weight_patches_uuid = None, object()
        made = step(clone)
        fresh = step(model)
        assert near(made, fresh), change
        step(clone)


def test_layers_that_bring_their_weights_are_comfyuis(model: Any, blocks: None) -> None:
    theirs, clone = step(model), with_ours(model)
    block = model.model.diffusion_model.middle_block[0]
    step(clone)
    conv = block.in_layers[2]
    conv.prev_comfy_cast_weights, conv.comfy_cast_weights = False, True
    assert near(step(clone), theirs) and counts()["residual block"] == 4
    assert "brings its weights from elsewhere in each call" in str(ours.rows()[0])
    conv.comfy_cast_weights = conv.prev_comfy_cast_weights
    del conv.prev_comfy_cast_weights
    step(clone)
    assert counts() == TOTALS
    conv.weight_function = []
    step(clone)
    conv.weight_function.append(lambda weight: 2 * weight)
    doubled = step(clone)
    assert counts()["residual block"] == 4
    assert near(doubled, step(model)) and not near(doubled, theirs)


def test_casting_layers_are_comfyuis(comfy: Any, blocks: None) -> None:
    model = model_of(comfy, operations=comfy.ops.manual_cast)
    theirs = step(model)
    assert torch.equal(step(with_ours(model)), theirs)
    assert set(counts().values()) == {0}
    assert all("brings its weights from elsewhere" in str(row) for row in ours.rows())
