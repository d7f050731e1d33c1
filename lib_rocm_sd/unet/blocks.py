"""The blocks of a UNet as programs: what each gives for one call, by compute.py.

Images are (N, C, H, W) in channels-last memory, where they come in and where they go out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.ops.conv.problem import NextNorm
from lib_rocm_sd.unet import compute
from lib_rocm_sd.unet.embeddings import Embeddings
from lib_rocm_sd.unet.parts import (
    Attention,
    Block,
    BlockCall,
    Ends,
    ImageCall,
    Resample,
    Resnet,
    Transformer,
    TransformerCall,
)
from lib_rocm_sd.unet.weights import UnetWeights


class TheirsError(Exception):
    """A module of the host raised `error` when it was called amid a block of ours."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, eq=False)
class Means:
    """What blocks compute with. `attends(module)`: why this attention is to be called as it is."""

    weights: UnetWeights
    session: Session
    attends: Callable[[nn.Module], str]
    embeddings: Embeddings


def resnet(parts: Resnet, call: ImageCall, means: Means) -> torch.Tensor:
    """A residual block: three launches and what its norms need."""
    session, x = means.session, pixels(call.x)
    norm = compute.norm_of(x, _norm(parts.norm1), session)
    embedding = None
    if parts.embed is not None and call.emb is not None:
        embedding = means.embeddings.of(call.emb, parts.embed, parts.embed_silu)
    weights = means.weights.of(parts.conv1)
    h, norm2 = compute.conv(
        x, weights, norm, next_norm=_norm(parts.norm2), embedding=embedding, session=session
    )
    through = None if parts.shortcut is None else parts.shortcut.weight.flatten(1)
    weights = means.weights.of(parts.conv2, parts.shortcut)
    y, _ = compute.conv(h, weights, norm2, x, through, session=session)
    return image(y)


def transformer(parts: Transformer, call: TransformerCall, means: Means) -> Any:
    """A transformer over an image's pixels. Its blocks are called as modules, ours or not."""
    x = pixels(call.x)
    batch, height, width, _ = x.shape
    norm = parts.norm
    tokens = compute.group_norm(
        x, norm.weight, norm.bias, norm.num_groups, norm.eps, False, means.session
    )
    h = _linear(tokens.view(batch, height * width, -1), parts.proj_in, means)
    for index, block in enumerate(parts.blocks):
        h = _called(block, h, call.given(index))
    h = h.to(x.dtype)
    residual = x.view(batch, height * width, -1)
    y = _linear(h, parts.proj_out, means, residual)
    return call.answer(image(y.view(batch, height, width, -1)))


def block(parts: Block, call: BlockCall, means: Means) -> torch.Tensor:
    """Self-attention, cross-attention and feed-forward, each after a LayerNorm and added to x."""
    x = call.x
    added = None
    own = _may_attend(parts.self_attention, parts.attn1, call.plain_own, means)
    normed, x = _normed(parts.norm1, x, None, means)
    if own is not None:
        x = _attended(own, normed, normed, x, means)
    else:
        added = _called(parts.attn1, normed, call.own)
    if parts.norm2 is not None and parts.attn2 is not None:
        normed, x = _normed(parts.norm2, x, added, means)
        added = None
        context = normed if call.context is None else call.context
        cross = _may_attend(parts.cross_attention, parts.attn2, call.plain_cross, means)
        if cross is not None and _fits(cross, context, x):
            x = _attended(cross, normed, context, x, means)
        else:
            added = _called(parts.attn2, normed, call.cross)
    normed, x = _normed(parts.norm3, x, added, means)
    if parts.feed_forward is None:
        return _called(parts.ff, normed, {}).to(x.dtype) + x
    gated: Any = parts.feed_forward.gated._parameters
    h = compute.linear(normed, gated["weight"], gated["bias"], gate=True, session=means.session)
    return _linear(h, parts.feed_forward.out, means, x)


def _may_attend(
    part: Attention | None, module: nn.Module, plain: bool, means: Means
) -> Attention | None:
    """`part` where ours may compute it in this call."""
    return None if part is None or not plain or means.attends(module) else part


def _fits(part: Attention, context: torch.Tensor, x: torch.Tensor) -> bool:
    """False for a context that a host's module would first have to make fit."""
    same = isinstance(context, torch.Tensor) and context.dtype == x.dtype
    same = same and context.device == x.device and context.ndim == 3
    return same and context.shape[0] == x.shape[0]


def _attended(
    part: Attention, x: torch.Tensor, context: torch.Tensor, residual: torch.Tensor, means: Means
) -> torch.Tensor:
    """to_out of attention of x (N, tokens, C) over `context`, plus `residual`."""
    heads = part.heads
    batch, tokens, _ = x.shape
    if context is x:
        joint = _linears(x, (part.to_q, part.to_k, part.to_v), means)
        q, k, v = joint.view(batch, tokens, 3, heads, -1).unbind(2)
    else:
        q = _linear(x, part.to_q, means).view(batch, tokens, heads, -1)
        joint = _linears(context, (part.to_k, part.to_v), means)
        k, v = joint.view(batch, context.shape[1], 2, heads, -1).unbind(2)
    mixed = compute.attention(q, k, v, means.session)
    return _linear(mixed, part.to_out, means, residual)


def resample(parts: Resample, call: ImageCall, means: Means) -> torch.Tensor:
    """Upsampling or downsampling by two."""
    resize = compute.upsample if parts.up else compute.downsample
    return image(resize(pixels(call.x), means.weights.of(parts.conv), means.session))


def ends(parts: Ends, call: ImageCall, means: Means) -> torch.Tensor:
    """The first convolution, or the last norm, SiLU and convolution."""
    x, norm, session = pixels(call.x), parts.norm, means.session
    if parts.conv is None:
        assert norm is not None
        made = compute.group_norm(
            x, norm.weight, norm.bias, norm.num_groups, norm.eps, parts.silu, session
        )
        return image(made)
    scale = None if norm is None else compute.norm_of(x, _norm(norm), session)
    y, _ = compute.conv(x, means.weights.of(parts.conv), scale, session=session)
    return image(y)


def pixels(x: torch.Tensor) -> torch.Tensor:
    """(N, C, H, W) as dense (N, H, W, C): the same memory where it is channels-last."""
    return x.permute(0, 2, 3, 1).contiguous()


def image(y: torch.Tensor) -> torch.Tensor:
    """(N, H, W, C) as (N, C, H, W), in the same memory."""
    return y.permute(0, 3, 1, 2)


def _norm(norm: nn.GroupNorm) -> NextNorm:
    return NextNorm(norm.weight, norm.bias, norm.num_groups, norm.eps)


def _normed(
    norm: nn.LayerNorm, x: torch.Tensor, added: torch.Tensor | None, means: Means
) -> tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm of x, plus `added` if given, and that sum."""
    own = norm._parameters
    weight, bias = own["weight"], own["bias"]
    if added is None:
        return compute.layer_norm(x, weight, bias, norm.eps, session=means.session), x
    added = added.to(x.dtype)
    both: tuple[torch.Tensor, torch.Tensor] = compute.layer_norm(
        x, weight, bias, norm.eps, added, means.session
    )
    return both


def _linear(
    x: torch.Tensor, layer: Any, means: Means, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """A Linear, or a 1x1 convolution of pixels."""
    own = layer._parameters  # as layer.weight, in a quarter of the time
    weight = own["weight"]
    weight = weight if weight.ndim == 2 else weight.flatten(1)
    return compute.linear(x, weight, own["bias"], residual, session=means.session)


def _linears(x: torch.Tensor, layers: tuple[nn.Linear, ...], means: Means) -> torch.Tensor:
    """Several Linears of x in one launch, one after the other in the last dimension."""
    own: Any = [layer._parameters for layer in layers]
    weights, biases = [item["weight"] for item in own], [item["bias"] for item in own]
    return compute.linear(x, weights, biases, session=means.session)


def _called(module: nn.Module, x: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    """What a host's module gives; what it raises goes to the host as it is."""
    try:
        made: torch.Tensor = module(x, **given)
    except Exception as error:
        raise TheirsError(error) from error
    return made
