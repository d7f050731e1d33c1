"""PixArt's and Wan's blocks in diffusers and ComfyUI: their parts, and what a call asks for.

Read in diffusers 0.42.1: models/attention.py, BasicTransformerBlock;
models/transformers/pixart_transformer_2d.py; models/transformers/transformer_wan.py. In
Comfy-Org/ComfyUI a125cd84 (0.3.64): comfy/ldm/pixart/pixartms.py, blocks.py;
comfy/ldm/wan/model.py.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.dit.parts import (
    ATTENTION,
    FEED_FORWARD,
    Crossed,
    FeedForward,
    Heads,
    Stream,
    TokensCall,
)
from lib_rocm_sd.hosts.read.dit import (
    apart,
    comfys_feed_forward,
    feed_forward_of,
    heads_of,
    nothing_more,
    tokens_call,
    wide_norms,
)
from lib_rocm_sd.hosts.read.findings import LAYER_NORM_CLASSES, Findings
from lib_rocm_sd.hosts.read.flux import plain_processor
from lib_rocm_sd.hosts.read.qwen import comfys_rotary_of
from lib_rocm_sd.hosts.read.unet_diffusers import Diffusers
from lib_rocm_sd.modules.stand_in import UnknownModuleError

NORM_TYPE = "ada_norm_single"
"""What tells PixArt's blocks from those of a UNet, which have the same class."""
_TABLE = "scale_shift_table"
_COMFYS_TABLE = "modulation"
_NORMS = ("norm_q", "norm_k")
_OWN_TIMES = "its tokens have time embeddings of their own"
_DIFFUSERS = Diffusers()


def pixart_call(
    module: Any,
    hidden_states: Any,
    attention_mask: Any = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None,
    timestep: Any = None,
    cross_attention_kwargs: Any = None,
    class_labels: Any = None,
    added_cond_kwargs: Any = None,
) -> TokensCall:
    """The prompt's mask is what diffusers adds to the scores, (N, 1, words)."""
    x, context, mask = hidden_states, encoder_hidden_states, encoder_attention_mask
    if attention_mask is not None:
        raise UnknownModuleError(("attention to the picture has a mask",))
    nothing_more(cross_attention_kwargs)
    rows = _rows_of(getattr(module, _TABLE), timestep, x)
    if context is None:
        raise UnknownModuleError(("it is given no prompt",))
    if mask is not None and (mask.shape != (len(x), 1, context.shape[1]) or mask.dtype != x.dtype):
        what = f"{str(mask.dtype).removeprefix('torch.')} {tuple(mask.shape)}"
        raise UnknownModuleError((f"attention to the prompt has a mask {what}",))
    return tokens_call(x, context, rows, lambda made: made, rows=True, mask=mask)


def _rows_of(table: torch.Tensor, embedding: Any, x: torch.Tensor) -> torch.Tensor:
    """A block's own table of six rows, to which those of the time embedding are added, (N, 6, C).
    UnknownModuleError where they do not go together.
    """
    rows = table.view(1, 6, -1)
    fits = embedding.numel() == len(x) * rows.numel() and rows.shape[2] == x.shape[2]
    if not fits or {table.device, embedding.device} != {x.device}:
        raise apart(x=x, table=table, embedding=embedding)
    return (rows + embedding.reshape(len(x), 6, -1)).to(x.dtype)


def pixart(found: Findings, module: Any) -> Crossed | None:
    """The parts of a block; what is not as expected goes to `found`."""
    children = ("norm1", "attn1", "norm2", "attn2", "ff")
    kind = ("BasicTransformerBlock",)
    if not found.block(module, "block", kind, children, root=True, own=(_TABLE,)):
        return None
    expected = {"norm_type": NORM_TYPE, "_chunk_size": None, "only_cross_attention": False}
    found.settings(module, "block", {**expected, "pos_embed": None})
    heads = [_heads_of(found, getattr(module, key), key) for key in ("attn1", "attn2")]
    feed_forward = feed_forward_of(found, module.ff, "ff")
    if module.attn2 is None:  # as in Latte's
        return None
    counts = module.attn1.heads, module.attn2.heads
    return _made(found, module, ("norm1", None, "norm2"), heads, feed_forward, counts)


def _heads_of(found: Findings, module: Any, name: str) -> Heads | None:
    made = _DIFFUSERS.attention(found, module, name)
    if made is None or made.to_out is None:
        return None
    if made.to_kv_more:
        found.add(f"{name} attends to images, too")
    return Heads(module, made.of_x, made.to_out, None, None)


def wan_call(
    module: Any, hidden_states: Any, encoder_hidden_states: Any, temb: Any, rotary_emb: Any
) -> TokensCall:
    """A time embedding of each token, as Wan 2.2's 5B has it, is not for us. A pair's cosine is the
    first of its two, its sine the last.
    """
    x = hidden_states
    if temb.ndim != 3:
        raise UnknownModuleError((_OWN_TIMES,))
    rotary: tuple[torch.Tensor, ...] = ()
    if rotary_emb is not None:
        tokens, width = (1, x.shape[1], 1), rotary_emb[0].shape[-1]
        if len(rotary_emb) != 2 or any(each.shape != (*tokens, width) for each in rotary_emb):
            raise UnknownModuleError((f"its rotary embedding is not {(*tokens, 'D')}",))
        halves = (each[:, :, 0, first::2].float() for first, each in enumerate(rotary_emb))
        rotary = tuple(each.repeat_interleave(2, 2) for each in halves)
    rows = _rows_of(getattr(module, _TABLE), temb, x)
    context = encoder_hidden_states
    return tokens_call(x, context, rows, lambda made: made, *rotary, rows=True)


def wan(found: Findings, module: Any) -> Crossed | None:
    """The parts of a block; what is not as expected goes to `found`."""
    children = ("norm1", "attn1", "norm2", "attn2", "norm3", "ffn")
    kind = ("WanTransformerBlock",)
    if not found.block(module, "block", kind, children, root=True, own=(_TABLE,)):
        return None
    heads = [_wans_heads(found, module, key) for key in ("attn1", "attn2")]
    feed_forward = feed_forward_of(found, module.ffn, "ffn")
    counts = module.attn1.heads, module.attn2.heads
    return _made(found, module, ("norm1", "norm2", "norm3"), heads, feed_forward, counts)


def _made(
    found: Findings,
    module: Any,
    norms: tuple[str, str | None, str],
    heads: list[Heads | None],
    feed_forward: FeedForward | None,
    counts: tuple[int, int],
) -> Crossed | None:
    """A block of these, if all widths are those of its tokens, and both counts of heads alike.
    `norms`: by their order; the second may be an Identity, or None.
    """
    first, between, last = norms
    norm1, norm2 = found.bare_norm(module, first), found.bare_norm(module, last)
    plain = between is None or type(getattr(module, between)) is nn.Identity
    norm: Any = None
    if between is not None and not plain:
        norm = found.called((getattr(module, between), between), LAYER_NORM_CLASSES)
        norm = norm or found.layer_norm(module, between)
    own, crossing = heads
    if norm1 is None or norm2 is None or (norm is None and not plain):
        return None
    if own is None or crossing is None or feed_forward is None:
        return None
    width, (to_q, *to_kv) = own.to_qkv[0].in_features, crossing.to_qkv
    sizes = own.widths | {layer.in_features for layer in own.to_qkv}
    sizes |= {to_q.in_features, to_q.out_features}
    sizes |= {sum(layer.out_features for layer in to_kv) // 2}
    sizes |= {each.to_out.out_features for each in (own, crossing) if each.to_out is not None}
    if sizes != {width} or len({*counts}) > 1 or counts[0] < 1 or width % counts[0]:
        found.add(f"{sorted({*counts})} heads of {width}, and layers of {sorted(sizes)}")
        return None
    stream = Stream(None, ATTENTION + FEED_FORWARD, norm1, own, norm2, feed_forward)
    return Crossed(stream, norm, crossing, counts[0])


def _wans_heads(found: Findings, block: Any, name: str) -> Heads | None:
    attn, crosses = getattr(block, name), name == "attn2"
    layers = ("to_q", "to_k", "to_v", "to_qkv", "to_kv", "to_out", "norm_q", "norm_k")
    if not found.block(attn, name, ("WanAttention",), layers):
        return None
    found.watch(attn, "heads", "fused_projections")
    home = sys.modules[type(attn).__module__]
    if not plain_processor(found, attn, "WanAttnProcessor", home):
        return None
    read: tuple[str, ...] = layers[:3]
    if getattr(attn, "fused_projections", False):
        read = ("to_q", "to_kv") if crosses else ("to_qkv",)
    return _across(found, attn, name, read, "to_out.0")


def _across(
    found: Findings, attn: Any, name: str, layers: tuple[str, ...], out: str
) -> Heads | None:
    wide_norms(found)
    made = heads_of(found, attn, name, layers, out, _NORMS)
    return None if made is None else replace(made, across=True)


# ComfyUI's.


def comfys_pixart_call(
    module: Any, x: Any, y: Any, t: Any, mask: Any = None, size: Any = None, **ignored: Any
) -> TokensCall:
    """The prompts lie one after another in y (1, N words, C); `mask` would be their lengths."""
    if mask is not None:
        raise UnknownModuleError(("its prompts have lengths",))
    rows = _rows_of(getattr(module, _TABLE).to(x), t, x)
    if y.ndim != 3 or y.shape[0] * y.shape[1] % len(x):
        raise apart(x=x, y=y)
    context = y.reshape(len(x), -1, y.shape[2])
    return tokens_call(x, context, rows, lambda made: made, rows=True)


def comfys_pixart(found: Findings, module: Any) -> Crossed | None:
    """The parts of a block; what is not as expected goes to `found`."""
    children = ("norm1", "attn", "cross_attn", "norm2", "mlp")
    if not found.block(module, "block", ("PixArtMSBlock",), children, root=True, own=(_TABLE,)):
        return None
    attn, cross = module.attn, module.cross_attn
    mine, theirs = ("qkv", "proj", "q_norm", "k_norm"), ("q_linear", "kv_linear", "proj")
    drops = ("attn_drop", "proj_drop")
    if not found.block(attn, "attn", ("AttentionKVCompress",), mine):
        return None
    if not found.block(cross, "cross_attn", ("MultiHeadCrossAttention",), (*theirs, *drops)):
        return None
    found.settings(attn, "attn", {"sr_ratio": 1})
    for key in mine[2:]:
        found.no_dropout(attn, key, "attn")
    found.no_dropout(cross, "proj_drop", "cross_attn")
    heads = [
        heads_of(found, attn, "attn", mine[:1], "proj", _NORMS),
        heads_of(found, cross, "cross_attn", theirs[:2], "proj", _NORMS),
    ]
    feed_forward = comfys_feed_forward(found, module.mlp, "mlp")
    counts = attn.num_heads, cross.num_heads
    return _made(found, module, ("norm1", None, "norm2"), heads, feed_forward, counts)


def comfys_wan_call(
    module: Any,
    x: Any,
    e: Any,
    freqs: Any,
    context: Any,
    context_img_len: Any = 257,
    transformer_options: Any = None,
) -> TokensCall:
    """The time embedding is e (N, 6, C) or (N, 1, 6, C)."""
    if e.ndim != 3 and e.shape[1] != 1:
        raise UnknownModuleError((_OWN_TIMES,))
    rows = _rows_of(getattr(module, _COMFYS_TABLE).to(x), e, x)
    rotary = comfys_rotary_of(freqs, x.shape[1])
    return tokens_call(x, context, rows, lambda made: made, *rotary, rows=True)


def comfys_wan(found: Findings, module: Any) -> Crossed | None:
    """The parts of a block; what is not as expected goes to `found`."""
    children = ("norm1", "self_attn", "norm3", "cross_attn", "norm2", "ffn")
    kind = ("WanAttentionBlock",)
    if not found.block(module, "block", kind, children, root=True, own=(_COMFYS_TABLE,)):
        return None
    heads, layers = [], ("q", "k", "v")
    for name, wanted in (("self_attn", "WanSelfAttention"), ("cross_attn", "WanT2VCrossAttention")):
        attn = getattr(module, name)
        if not found.block(attn, name, (wanted,), (*layers, "o", *_NORMS)):
            return None
        heads.append(_across(found, attn, name, layers, "o"))
    up = down = None
    if found.listed(module, "ffn", "", 3):
        found.gelu(module, "ffn.1")
        up, down = found.layer(module, "ffn.0"), found.layer(module, "ffn.2")
    feed_forward = None if up is None or down is None else FeedForward(up, down)
    counts = module.self_attn.num_heads, module.cross_attn.num_heads
    return _made(found, module, ("norm1", "norm3", "norm2"), heads, feed_forward, counts)
