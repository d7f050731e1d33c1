"""The modules of real UNets beside the description of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.catalog.unet import BATCH, SD15, SDXL, TOKENS, Join, Layer
from lib_rocm_sd.lab.models import CONFIGS
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.group_norm.problem import GroupNormProblem, NormProblem
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from lib_rocm_sd.ops.linear.problem import LinearProblem

UNETS = {"SD 1.5": SD15, "SDXL": SDXL}
Module = tuple[Any, ...]
"""Its kind, the shape that it is given, the shape that it makes."""


def conv(
    batch: int,
    height: int,
    width: int,
    taken: int,
    out: int,
    kind: str = "3x3",
    **fused: Any,
) -> Layer:
    """With weights as they lie."""
    return Layer(ConvProblem(kind, batch, height, width, taken, out, in_rows=True, **fused))


def linear(
    rows: int, k: int, columns: tuple[int, ...], pointwise: bool = False, **fused: Any
) -> Layer:
    return Layer(LinearProblem(rows, k, columns, **fused), pointwise=pointwise)


def group_norm(batch: int, height: int, width: int, channels: int, applied: bool) -> Layer:
    """Unless `applied`, its scale and shift."""
    kind = GroupNormProblem if applied else NormProblem
    return Layer(kind(batch, channels, height, width))


def modules_of(layer: Layer) -> Iterator[Module]:
    """The model's modules and calls that a layer stands for."""
    p = layer.problem
    if isinstance(p, ConvProblem):
        batch, taken, out = p.batch, p.in_channels, p.out_channels
        size, made = (p.height, p.width), p.out_size
        read = made if p.kind == "upsample" else size
        yield "Conv2d 3x3", (batch, taken, *read), (batch, out, *made)
        if p.shortcut == "conv":
            first = (batch, p.shortcut_channels, *size)
            yield "Conv2d 1x1", first, (batch, out, *made)
        if p.norm:
            yield "GroupNorm", (batch, taken, *size), (batch, taken, *size)
    elif isinstance(p, LinearProblem):
        for columns in p.columns:
            kind = "Conv2d 1x1" if layer.pointwise else "Linear"
            yield kind, (p.rows, p.k), (p.rows, columns * (1 + p.gate))
    elif isinstance(p, GroupNormProblem):
        yield "GroupNorm", p.shape, p.shape
    elif isinstance(p, LayerNormProblem):
        yield "LayerNorm", (p.rows, p.channels), (p.rows, p.channels)
    elif isinstance(p, AttentionProblem):
        heads = (p.batch, p.heads)
        yield "attention", (*heads, p.seq_q, p.head_dim), (*heads, p.seq_k)
    elif isinstance(p, Join):
        yield "concatenation", (p.batch, p.channels, p.height, p.width)


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
