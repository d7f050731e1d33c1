"""Transformers whose layers bring, cast or make their weights in each call, as ComfyUI has them
where a model is loaded in parts or is in fp8: those layers are called as they are, and the rest of
their blocks is ours.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.hosts.comfyui import unet as ours
from lib_rocm_sd.hosts.comfyui.host import tally
from lib_rocm_sd.hosts.comfyui.model import optimized
from lib_rocm_sd.hosts.read import crossed
from lib_rocm_sd.hosts.read.findings import GGUF_LAYER_NORM
from lib_rocm_sd.hosts.read.unet import transformer_kind
from tests.comfyui.test_comfyui_flux import ALL, CLASSES, COUNTS, transformer_of
from tests.comfyui.unet_steps import counts, near, step
from tests.graph_tape import recording_cpu

CALLED = "layers that bring or make their weights in each call are called as they are"
BLOCKS = {"single_blocks", "double_blocks", "transformer_blocks", "blocks"}


def layers_of(model: Any) -> list[Any]:
    """The linear layers in its blocks."""
    named = model.model.diffusion_model.named_modules()
    return [
        layer
        for name, layer in named
        if name.partition(".")[0] in BLOCKS and isinstance(layer, nn.Linear)
    ]


def called() -> int:
    """In how many blocks."""
    return sum(row.partly.get(CALLED, 0) for row in ours.rows())


@pytest.mark.parametrize("name", CLASSES)
def test_of_a_model_in_parts_the_rest_of_a_block_is_ours(
    comfy: Any, blocks: None, name: str
) -> None:
    """Every third layer is streamed, and a LoRA of some is a function of their weights."""
    model = transformer_of(comfy, name)
    plain = step(model)
    for layer in layers_of(model)[::3]:
        layer.prev_comfy_cast_weights, layer.comfy_cast_weights = False, True
    for layer in layers_of(model)[::4]:
        layer.weight_function = [lambda weight: 1.5 * weight]
    theirs = step(model)
    assert not near(plain, theirs)
    clone = optimized(model, "Auto", attention=True, unet=True)
    for _ in range(2):
        assert near(step(clone), theirs)
    assert counts() == COUNTS.get(name, ALL) and called() and not tally.left
    assert torch.equal(step(model), theirs)


def test_what_is_loaded_whole_again_is_read_again(comfy: Any, blocks: None) -> None:
    model = transformer_of(comfy)
    plain, clone = step(model), optimized(model, "Auto", attention=True, unet=True)
    step(clone)
    assert not called()
    functions = layers_of(model)[2].weight_function = [lambda weight: 9 * weight]
    changed = step(clone)
    assert called() == 1 and not near(changed, plain)
    functions.clear()
    assert near(step(clone), plain) and not called() and counts() == ALL


@pytest.mark.parametrize("name", CLASSES)
def test_blocks_in_fp8_are_ours(
    comfy: Any, blocks: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """All weights, those of norms and tables too: ComfyUI casts each to the dtype of its input."""
    monkeypatch.setattr(comfy.ops, "disable_weight_init", comfy.ops.manual_cast)
    model = transformer_of(comfy, name)
    with torch.inference_mode():
        for path, parameter in model.model.diffusion_model.named_parameters():
            if path.partition(".")[0] in BLOCKS:
                parameter.data = parameter.data.to(torch.float8_e4m3fn)
    theirs = step(model)
    assert near(step(optimized(model, "Auto", attention=True, unet=True)), theirs)
    assert counts() == COUNTS.get(name, ALL) and called() == sum(counts().values())
    assert torch.equal(step(model), theirs)


@pytest.mark.parametrize("name", CLASSES)
def test_blocks_in_gguf_are_ours(
    comfy: Any, blocks: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Layers derived from those that cast, as a custom node has them: weights packed in bytes."""
    base = comfy.ops.manual_cast

    class GGMLOps(base):  # type: ignore[misc, valid-type]
        class Linear(base.Linear):  # type: ignore[misc, name-defined]
            def forward_comfy_cast_weights(self, x: torch.Tensor) -> torch.Tensor:
                weight = self.weight.to(x) * self.scale.to(x)
                return nn.functional.linear(x, weight, self.bias)

        class LayerNorm(base.LayerNorm):  # type: ignore[misc, name-defined]
            __qualname__ = GGUF_LAYER_NORM

    monkeypatch.setattr(comfy.ops, "disable_weight_init", GGMLOps)
    model = transformer_of(comfy, name)
    with torch.inference_mode():
        for layer in model.model.diffusion_model.modules():
            if isinstance(layer, nn.Linear):
                scale = layer.weight.float().abs().amax(1, keepdim=True) / 127
                packed = (layer.weight.float() / scale).round().to(torch.int8)
                layer.weight, layer.scale = nn.Parameter(packed, requires_grad=False), scale
    theirs = step(model)
    assert near(step(optimized(model, "Auto", attention=True, unet=True)), theirs)
    assert counts() == COUNTS.get(name, ALL) and called() == sum(counts().values())
    assert torch.equal(step(model), theirs)


def test_what_is_cast_to_float32_is_comfyuis_and_is_said(comfy: Any, blocks: None) -> None:
    """As a model in bf16 is where a card has none: its weights say nothing of that."""
    model = transformer_of(comfy, dtype=torch.float32)
    for layer in layers_of(model):
        layer.comfy_cast_weights, layer.weight.data = True, layer.weight.data.bfloat16()
    theirs = step(model)
    assert torch.equal(step(optimized(model, "Auto", attention=True, unet=True)), theirs)
    assert {kind: {"it is computed in float32": total} for kind, total in ALL.items()} == {
        row.kind: row.left for row in ours.rows()
    }


@pytest.mark.parametrize("name", CLASSES)
def test_hooks_of_layers_that_cast_see_what_comfyui_gives_them(
    comfy: Any, blocks: None, name: str
) -> None:
    """Images and tokens, not rows; and what follows of a result of theirs is ComfyUI's."""
    model, seen = transformer_of(comfy, name), []
    for layer in layers_of(model):
        layer.comfy_cast_weights = True
    layers = layers_of(model)[2], layers_of(model)[-1]
    layers[0].register_forward_hook(lambda _, given, made: seen.append(given[0].shape))
    layers[1].forward = lambda x: nn.Linear.forward(layers[1], x.roll(1, 1))
    theirs = step(model)
    assert near(step(optimized(model, "Auto", attention=True, unet=True)), theirs)
    assert len(seen) == 2 and seen[0] == seen[1]
    why = sorted(reason for row in ours.rows() for reason in row.left)
    assert len(why) == 2 and "forward hooks" in " ".join(why) and "replaced" in " ".join(why)


def test_norms_may_lie_elsewhere(comfy: Any, blocks: None) -> None:
    """ComfyUI unloads the smallest modules first."""
    model = transformer_of(comfy)
    for block in model.model.diffusion_model.single_blocks:
        block.norm.query_norm.scale.data = block.norm.query_norm.scale.data.float()
    theirs = step(model)
    assert near(step(optimized(model, "Auto", attention=True, unet=True)), theirs)
    assert counts() == ALL and not tally.left


@pytest.mark.parametrize("name", ["PixArt", "Wan"])
def test_tables_may_lie_elsewhere(comfy: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Those of a block are its own parameters, which ComfyUI leaves where they are."""
    block = transformer_of(comfy, name).model.diffusion_model.blocks[0]
    kind, tables = transformer_kind(block), []

    def added(table: torch.Tensor, times: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        tables.append((table.device, table.dtype))
        return x[:, :6]

    monkeypatch.setattr(crossed, "_rows_of", added)
    x = torch.empty(2, 64, 48, dtype=torch.bfloat16, device="meta")
    given: dict[str, dict[str, Any]] = {
        "PixArt": {"y": x, "t": x},
        "Wan": {"e": x, "context": x, "freqs": None},
    }
    assert kind is not None and kind.bind(block, x, **given[name])
    assert tables == [(x.device, x.dtype)]


def test_what_is_called_is_not_recorded(comfy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "unusable", lambda device: [])
    model = transformer_of(comfy)
    for layer in layers_of(model):
        layer.comfy_cast_weights = True
    theirs = step(model)
    clone, desk = optimized(model, "Auto", attention=True, unet=True), recording_cpu(monkeypatch)
    assert all(near(step(clone), theirs) for _ in range(4)) and not desk.recorded
    for layer in layers_of(model):
        layer.comfy_cast_weights = False
    assert all(near(step(clone), theirs) for _ in range(4)) and desk.recorded


def test_what_a_layer_raises_is_comfyuis_to_see(comfy: Any, blocks: None) -> None:
    model = transformer_of(comfy)

    def fails(weight: torch.Tensor) -> torch.Tensor:
        raise OSError("the file is gone")

    layers_of(model)[0].weight_function = [fails]
    with pytest.raises(OSError, match="the file is gone"):
        step(optimized(model, "Auto", attention=True, unet=True))
