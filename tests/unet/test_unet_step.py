"""The description of a step beside the modules of real UNets, and beside what our blocks ask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from torch import nn

from lib_rocm_sd.bench.unet.models import CONFIGS
from lib_rocm_sd.unet_step import (
    BATCH,
    SD15,
    SDXL,
    TOKENS,
    Attention,
    Conv,
    GroupNorm,
    Join,
    Layer,
    LayerNorm,
    Linear,
    Unet,
    step,
)

UNETS = {"SD 1.5": SD15, "SDXL": SDXL}
CASES = [("SD 1.5", 512, 512), ("SD 1.5", 768, 512), ("SDXL", 1024, 1024), ("SDXL", 832, 1216)]
Module = tuple[Any, ...]
"""Its kind, the shape that it is given, the shape that it makes."""


def modules_of(layer: Layer) -> Iterator[Module]:
    """The model's modules and calls that a layer stands for."""
    if isinstance(layer, Conv):
        batch, taken, out = layer.batch, layer.in_channels, layer.out_channels
        size, made = (layer.height, layer.width), layer.out_size
        read = made if layer.kind == "upsample" else size
        yield "Conv2d 3x3", (batch, taken, *read), (batch, out, *made)
        if layer.shortcut == "conv":
            first = (batch, layer.shortcut_channels, *size)
            yield "Conv2d 1x1", first, (batch, out, *made)
        if layer.norm:
            yield "GroupNorm", (batch, taken, *size), (batch, taken, *size)
    elif isinstance(layer, Linear):
        for columns in layer.columns:
            kind = "Conv2d 1x1" if layer.pointwise else "Linear"
            yield kind, (layer.rows, layer.k), (layer.rows, columns * (1 + layer.gate))
    elif isinstance(layer, GroupNorm) and layer.applied:
        shape = (layer.batch, layer.channels, layer.height, layer.width)
        yield "GroupNorm", shape, shape
    elif isinstance(layer, LayerNorm):
        yield "LayerNorm", (layer.rows, layer.channels), (layer.rows, layer.channels)
    elif isinstance(layer, Attention):
        heads = (layer.batch, layer.heads)
        yield "attention", (*heads, layer.seq_q, layer.head_dim), (*heads, layer.seq_k)
    elif isinstance(layer, Join):
        yield "concatenation", (layer.batch, layer.channels, layer.height, layer.width)


def seen(module: nn.Module, given: torch.Tensor, made: torch.Tensor) -> Module:
    """As `modules_of` has it; rows of tokens, and of pixels where a projection has no patch."""
    shapes = tuple(given.shape), tuple(made.shape)
    if isinstance(module, nn.Conv2d):
        return f"Conv2d {module.kernel_size[0]}x{module.kernel_size[1]}", *shapes
    if isinstance(module, nn.GroupNorm):
        return "GroupNorm", *shapes
    rows = given.numel() // given.shape[-1]
    return type(module).__name__, (rows, given.shape[-1]), (rows, made.shape[-1])


def as_rows(found: Counter[Module], flat: set[Module]) -> Counter[Module]:
    """1x1 convolutions of images as products of rows, where the description has them so."""
    made: Counter[Module] = Counter()
    for each, count in found.items():
        kind, given, *rest = each
        if kind == "Conv2d 1x1":
            batch, channels, height, width = given
            rows = batch * height * width
            product = (kind, (rows, channels), (rows, rest[0][1]))
            each = product if product in flat and each not in flat else each
        made[each] += count
    return made


@cache
def called(name: str, width: int, height: int) -> Counter[Module]:
    """The modules, attentions and concatenations of diffusers' UNet, run without memory."""
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        unet = UNet2DConditionModel(**CONFIGS[name])
    found: Counter[Module] = Counter()

    def note(module: nn.Module, given: Any, made: Any) -> None:
        found[seen(module, given[0], made)] += 1

    for module in unet.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.GroupNorm | nn.LayerNorm):
            module.register_forward_hook(note)
    attention, cat = nn.functional.scaled_dot_product_attention, torch.cat

    def attend(q: torch.Tensor, k: torch.Tensor, *args: Any, **how: Any) -> Any:
        found["attention", tuple(q.shape), (*k.shape[:3],)] += 1
        return attention(q, k, *args, **how)

    def join(tensors: Any, *args: Any, **how: Any) -> Any:
        made = cat(tensors, *args, **how)
        if made.ndim == 4:
            found["concatenation", tuple(made.shape)] += 1
        return made

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(nn.functional, "scaled_dot_product_attention", attend)
        patch.setattr(torch, "cat", join)
        unet(*arguments(name, width, height))
    return found


def arguments(name: str, width: int, height: int, **how: Any) -> tuple[Any, ...]:
    """Of one call, in the order of diffusers' parameters."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta", **how)

    added = None
    if name == "SDXL":
        added = {"text_embeds": empty(BATCH, 1280), "time_ids": empty(BATCH, 6)}
    text = empty(BATCH, TOKENS, CONFIGS[name]["cross_attention_dim"])
    latents = empty(BATCH, 4, height // 8, width // 8)
    return latents, torch.tensor(5, device="meta"), text, None, None, None, None, added


@pytest.mark.parametrize(("name", "width", "height"), CASES)
def test_the_layers_are_those_of_the_model(name: str, width: int, height: int) -> None:
    layers = step(UNETS[name], width, height)
    wanted = Counter(module for layer in layers for module in modules_of(layer))
    assert as_rows(called(name, width, height), set(wanted)) == wanted


COUNTED = {
    "SD 1.5": {
        ("Conv2d 3x3", 1280, 1280, 8): 11,
        ("Conv2d 3x3", 1280, 1280, 16): 7,
        ("Conv2d 3x3", 320, 320, 64): 7,
        ("Conv2d 3x3", 640, 640, 32): 6,
        ("Conv2d 3x3", 2560, 1280, 16): 2,
        ("Conv2d 3x3", 2560, 1280, 8): 3,
        ("Conv2d 3x3", 640, 320, 64): 2,
        ("Conv2d 1x1", 8192, 320, 320): 10,
        ("Conv2d 1x1", 2048, 640, 640): 10,
        ("Linear", 8192, 320, 320): 30,
        ("Linear", 8192, 320, 2560): 5,
        ("Linear", 512, 5120, 1280): 5,
        ("Linear", 2, 1280, 1280): 13,
    },
    "SDXL": {
        ("Conv2d 3x3", 1280, 1280, 32): 10,
        ("Conv2d 3x3", 320, 320, 128): 7,
        ("Conv2d 3x3", 1280, 1280, 64): 1,
        ("Conv2d 3x3", 640, 320, 128): 2,
        ("Linear", 2048, 1280, 10240): 60,
        ("Linear", 2048, 1280, 1280): 372,
        ("Linear", 154, 2048, 1280): 120,
        ("Linear", 8192, 640, 640): 70,
        ("Linear", 8192, 2560, 640): 10,
    },
}
"""Calls in a profile of a step of both models at 512x512 and 1024x1024: of an image its channels
and side, else rows, and values in and out.
"""


@pytest.mark.parametrize("name", COUNTED)
def test_what_was_counted_in_a_profile(name: str) -> None:
    side = {"SD 1.5": 512, "SDXL": 1024}[name]
    found: Counter[Module] = Counter()
    for layer in step(UNETS[name], side, side):
        for kind, given, *made in modules_of(layer):
            if kind.startswith(("Conv2d", "Linear")):
                image = len(given) == 4
                sizes = (given[1], *made[0][1:3]) if image else (*given, made[0][1])
                kind = kind if given[2:] == made[0][2:] else f"{kind} stride 2"
                found[(kind, *sizes)] += 1
    for each, count in COUNTED[name].items():
        assert found[each] == count, each


MEASURED = (
    (Conv(2, 8, 8, 1280, 1280), 27.2, 139),
    (Conv(2, 64, 64, 320, 320), 36.6, 412),
    (Conv(2, 64, 64, 1280, 1280), 353.6, 683),
    (Linear("", 8192, 320, (1280,), gate=True), 29.8, 450),
    (Linear("", 2048, 5120, (1280,)), 38.4, 699),
    (Linear("", 154, 2048, (1280,)), 6.7, 120),
)
"""Layers, and what a library took for one of them on an H200: us and TFLOP/s."""


@pytest.mark.parametrize(("layer", "us", "tflops"), MEASURED)
def test_operations_are_those_that_were_counted(layer: Layer, us: float, tflops: float) -> None:
    assert isinstance(layer, Conv | Linear)
    assert layer.flops == pytest.approx(us * tflops * 1e6, rel=0.02)


@pytest.mark.parametrize("unet", [SD15, SDXL])
def test_each_norm_that_a_convolution_applies_has_statistics(unet: Unet) -> None:
    """From a pass over the image, or from the convolution that made it."""
    layers = step(unet, 512, 512)
    applied = sum(isinstance(each, Conv) and each.norm for each in layers)
    taken = sum(isinstance(each, GroupNorm) and not each.applied for each in layers)
    made = sum(isinstance(each, Conv) and each.statistics for each in layers)
    assert applied == taken + made


def test_a_size_that_cannot_be_halved_is_refused() -> None:
    with pytest.raises(ValueError, match="520x512 is no multiple of 64"):
        step(SD15, 520, 512)
    assert step(SDXL, 544, 512)
