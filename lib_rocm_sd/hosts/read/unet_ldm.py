"""The blocks of ldm's and sgm's UNetModel: their parts, and what a call asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from lib_rocm_sd.hosts.read.findings import Findings
from lib_rocm_sd.unet.parts import (
    Attention,
    Block,
    BlockCall,
    Ends,
    FeedForward,
    ImageCall,
    Resample,
    Resnet,
    Transformer,
    TransformerCall,
)

PREFERRED = "comfy_attention"
PREFERRED_CLASS = ("comfy.ldm.modules.attention", "ComfyAttention")
_Part = TypeVar("_Part")


def resnet(found: Findings, module: Any) -> Resnet | None:
    layers = ("in_layers", "emb_layers", "out_layers", "skip_connection")
    children = (*layers, "h_upd", "x_upd")
    if not found.block(module, "block", ("ResBlock",), children, root=True):
        return None
    expected = {"updown": False, "use_scale_shift_norm": False, "exchange_temb_dims": False}
    found.settings(module, "block", expected)
    found.settings(module, "block", {"skip_t_emb": False})
    first = found.listed(getattr(module, "in_layers", None), "in_layers", 3)
    embedding = found.listed(getattr(module, "emb_layers", None), "emb_layers", 2)
    second = found.listed(getattr(module, "out_layers", None), "out_layers", 4)
    if not (first and embedding and second):
        return None
    found.silu(first[1], "in_layers.1")
    found.silu(embedding[0], "emb_layers.0")
    found.silu(second[1], "out_layers.1")
    found.no_dropout(second[2], "out_layers.2")
    norm1, conv1 = found.group_norm(first[0], "in_layers.0"), found.conv(first[2], "in_layers.2")
    embed = found.linear(embedding[1], "emb_layers.1")
    norm2 = found.group_norm(second[0], "out_layers.0")
    conv2 = found.conv(second[3], "out_layers.3")
    shortcut = _skip(found, module)
    if norm1 is None or conv1 is None or embed is None or norm2 is None or conv2 is None:
        return None
    return Resnet(norm1, conv1, embed, True, norm2, conv2, shortcut)


def _skip(found: Findings, module: Any) -> nn.Conv2d | None:
    skip = getattr(module, "skip_connection", None)
    if type(skip) is nn.Identity:
        found.untouched(skip, "skip_connection")
        return None
    return found.conv(skip, "skip_connection", kernel=1)


def resnet_call(module: Any, x: Any, emb: Any) -> ImageCall | None:
    return ImageCall(x, emb)


def transformer(found: Findings, module: Any) -> Transformer | None:
    children = ("norm", "proj_in", "transformer_blocks", "proj_out")
    if not found.block(module, "transformer", ("SpatialTransformer",), children, root=True):
        return None
    norm = found.group_norm(getattr(module, "norm", None), "norm")
    proj_in = found.projection(getattr(module, "proj_in", None), "proj_in")
    proj_out = found.projection(getattr(module, "proj_out", None), "proj_out")
    blocks = found.listed(getattr(module, "transformer_blocks", None), "transformer_blocks")
    if norm is None or proj_in is None or proj_out is None:
        return None
    return Transformer(norm, proj_in, tuple(blocks), proj_out)


def transformer_call(module: Any, x: Any, context: Any = None) -> TransformerCall | None:
    """One context, or a list with one for each block, or with one for all of them."""
    contexts = context if isinstance(context, list) else [context]
    if len(contexts) not in (1, len(module.transformer_blocks)):
        return None

    def given(index: int) -> dict[str, Any]:
        return {"context": contexts[index if len(contexts) > 1 else 0]}

    return TransformerCall(x, given, lambda y: y)


def block(found: Findings, module: Any) -> Block | None:
    children = ("norm1", "attn1", "norm2", "attn2", "norm3", "ff")
    if not found.block(module, "block", ("BasicTransformerBlock",), children, root=True):
        return None
    found.settings(module, "block", {"disable_self_attn": False})
    found.watch(module, "disable_self_attn")
    norm1, norm2, norm3 = (
        found.layer_norm(getattr(module, key, None), key) for key in ("norm1", "norm2", "norm3")
    )
    own, cross, ff = (getattr(module, key, None) for key in ("attn1", "attn2", "ff"))
    if norm1 is None or norm2 is None or norm3 is None or None in (own, cross, ff):
        return None
    return Block(
        norm1,
        norm2,
        norm3,
        module.attn1,
        module.attn2,
        module.ff,
        whole(found, "attn1", lambda part, name: _attention(part, name, own)),
        whole(found, "attn2", lambda part, name: _attention(part, name, cross)),
        whole(found, "ff", lambda part, name: _feed_forward(part, name, ff)),
    )


def block_call(
    module: Any,
    x: Any,
    context: Any = None,
    additional_tokens: Any = None,
    n_times_crossframe_attn_in_self: int = 0,
) -> BlockCall | None:
    """More tokens, and attention across frames, are not for us."""
    if additional_tokens is not None or n_times_crossframe_attn_in_self:
        return None
    return BlockCall(x, context, {"context": None}, {"context": context})


def _attention(found: Findings, name: str, module: Any) -> Attention | None:
    classes = ("CrossAttention", "MemoryEfficientCrossAttention")
    layers = ("to_q", "to_k", "to_v", "to_out")
    if not found.block(module, name, classes, (*layers, *_preferred(module))):
        return None
    found.watch(module, "heads", "scale")
    out = found.listed(getattr(module, "to_out", None), f"{name}.to_out", 2)
    if out:
        found.no_dropout(out[1], f"{name}.to_out.1")
    q, k, v = (found.linear(getattr(module, key, None), f"{name}.{key}") for key in layers[:3])
    last = found.linear(out[0], f"{name}.to_out.0") if out else None
    if q is None or k is None or v is None or last is None:
        return None
    part = heads_of(found, Attention(q, k, v, last, module.heads))
    if part is not None:
        found.settings(module, name, {"scale": (q.out_features // part.heads) ** -0.5})
    return part


def _preferred(module: Any) -> tuple[str, ...]:
    """ComfyUI's child without parameters that names the function which a checkpoint prefers.

    It does not matter which: ComfyUI asks a model's override before it, and ours computes attention
    only where the override is ours. Read in Comfy-Org/ComfyUI 05080f60 (0.38):
    comfy/ldm/modules/attention.py, ComfyAttention and wrap_attn.
    """
    cls = type(getattr(module, PREFERRED, None))
    return (PREFERRED,) if (cls.__module__, cls.__name__) == PREFERRED_CLASS else ()


def _feed_forward(found: Findings, name: str, module: Any) -> FeedForward | None:
    if not found.block(module, name, ("FeedForward",), ("net",)):
        return None
    return gated(found, name, found.listed(getattr(module, "net", None), f"{name}.net", 3))


def resample(found: Findings, module: Any) -> Resample | None:
    up = type(module).__name__ == "Upsample"
    key = "conv" if up else "op"
    if not found.block(module, "sampler", ("Upsample" if up else "Downsample",), (key,), root=True):
        return None
    found.settings(module, "sampler", {"use_conv": True, "dims": 2})
    conv = found.conv(getattr(module, key, None), key, stride=1 if up else 2, padding=1)
    return None if conv is None else Resample(conv, up)


def resample_call(module: Any, x: Any) -> ImageCall | None:
    return ImageCall(x)


def end(found: Findings, module: Any) -> Ends | None:
    """`out`: GroupNorm, SiLU, 3x3 convolution; or the convolution that a UNet begins with."""
    if isinstance(module, nn.Conv2d):
        conv = found.conv(module, "conv")
        return None if conv is None else Ends(None, False, conv)
    layers = found.listed(module, "out", 3)
    if not layers:
        return None
    norm, conv = found.group_norm(layers[0], "out.0"), found.conv(layers[2], "out.2")
    found.silu(layers[1], "out.1")
    return None if norm is None or conv is None else Ends(norm, True, conv)


def end_call(module: Any, input: Any) -> ImageCall | None:  # noqa: A002 - what torch calls it
    return ImageCall(input)


def whole(
    found: Findings, name: str, read: Callable[[Findings, str], _Part | None]
) -> _Part | None:
    """What `read` gives if nothing was found against it; else None, the reasons noted as partial.

    The rest of the block is read all the same: the module is called as it is.
    """
    part = found.part()
    made = read(part, name)
    found.watched += part.watched
    found.functions += part.functions
    if made is None or part.reasons:
        found.partly += part.reasons
        return None
    return made


def heads_of(found: Findings, part: Attention) -> Attention | None:
    """`part` if its sizes are those of attention with whole heads."""
    width = part.to_q.out_features
    sizes = {part.to_k.out_features, part.to_v.out_features, part.to_out.in_features}
    if sizes != {width} or part.heads < 1 or width % part.heads:
        found.add(f"{part.heads} heads of queries {width} wide, keys and values {sorted(sizes)}")
        return None
    return part


def gated(found: Findings, name: str, net: Sequence[Any]) -> FeedForward | None:
    """A feed-forward net of GEGLU, dropout and Linear; a second dropout may follow."""
    if not net:
        return None
    if not found.block(net[0], f"{name}.net.0", ("GEGLU",), ("proj",)):
        return None
    proj = found.linear(getattr(net[0], "proj", None), f"{name}.net.0.proj")
    for number in range(1, len(net)):
        if number != 2:
            found.no_dropout(net[number], f"{name}.net.{number}")
    out = found.linear(net[2], f"{name}.net.2")
    if proj is None or out is None:
        return None
    if proj.out_features != 2 * out.in_features:
        found.add(f"{name} has {proj.out_features} gated features for {out.in_features}")
        return None
    return FeedForward(proj, out)
