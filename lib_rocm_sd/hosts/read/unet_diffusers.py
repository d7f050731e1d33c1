"""The blocks of diffusers' UNet2DConditionModel: their parts, and what a call asks for."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.hosts.read.findings import Findings
from lib_rocm_sd.hosts.read.unet_ldm import gated, heads_of, whole
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

PROCESSORS = {
    "AttnProcessor2_0": False,
    "XFormersAttnProcessor": False,
    "AttnProcessor": True,
    "SlicedAttnProcessor": True,
}
"""The processors whose arithmetic ours does, and whether each heeds `upcast_attention`."""
HOME = "diffusers.models.attention_processor"
TORCHS = "AttnProcessor2_0"
"""It calls torch's attention without a scale, whatever that of its module."""
_PLAIN_ATTENTION = {
    "norm_q": None,
    "norm_k": None,
    "norm_cross": None,
    "group_norm": None,
    "spatial_norm": None,
    "add_k_proj": None,
    "added_kv_proj_dim": None,
    "residual_connection": False,
    "rescale_output_factor": 1.0,
    "fused_projections": False,
    "is_causal": False,
    "scale_qk": True,
}


def resnet(found: Findings, module: Any) -> Resnet | None:
    children = ("norm1", "conv1", "time_emb_proj", "norm2", "dropout", "conv2", "nonlinearity")
    if not found.block(
        module, "block", ("ResnetBlock2D",), (*children, "conv_shortcut"), root=True
    ):
        return None
    expected = {"up": False, "down": False, "upsample": None, "downsample": None}
    found.settings(module, "block", expected)
    found.settings(module, "block", {"time_embedding_norm": "default", "pre_norm": True})
    found.settings(module, "block", {"output_scale_factor": 1.0})
    found.silu(getattr(module, "nonlinearity", None), "nonlinearity")
    found.no_dropout(getattr(module, "dropout", None), "dropout")
    norm1 = found.group_norm(getattr(module, "norm1", None), "norm1")
    conv1 = found.conv(getattr(module, "conv1", None), "conv1")
    norm2 = found.group_norm(getattr(module, "norm2", None), "norm2")
    conv2 = found.conv(getattr(module, "conv2", None), "conv2")
    projection = getattr(module, "time_emb_proj", None)
    embed = None if projection is None else found.linear(projection, "time_emb_proj")
    through = getattr(module, "conv_shortcut", None)
    shortcut = None if through is None else found.conv(through, "conv_shortcut", kernel=1)
    if norm1 is None or conv1 is None or norm2 is None or conv2 is None:
        return None
    silu = not getattr(module, "skip_time_act", False)
    return Resnet(norm1, conv1, embed, silu, norm2, conv2, shortcut)


def resnet_call(module: Any, input_tensor: Any, temb: Any = None) -> ImageCall | None:
    return ImageCall(input_tensor, temb)


def transformer(found: Findings, module: Any) -> Transformer | None:
    children = ("norm", "proj_in", "transformer_blocks", "proj_out")
    if not found.block(module, "transformer", ("Transformer2DModel",), children, root=True):
        return None
    found.settings(module, "transformer", {"is_input_continuous": True})
    norm = found.group_norm(getattr(module, "norm", None), "norm")
    proj_in = found.projection(getattr(module, "proj_in", None), "proj_in")
    proj_out = found.projection(getattr(module, "proj_out", None), "proj_out")
    blocks = found.listed(getattr(module, "transformer_blocks", None), "transformer_blocks")
    if norm is None or proj_in is None or proj_out is None:
        return None
    return Transformer(norm, proj_in, tuple(blocks), proj_out)


def transformer_call(
    module: Any,
    hidden_states: Any,
    encoder_hidden_states: Any = None,
    timestep: Any = None,
    added_cond_kwargs: Any = None,
    class_labels: Any = None,
    cross_attention_kwargs: Any = None,
    attention_mask: Any = None,
    encoder_attention_mask: Any = None,
    return_dict: bool = True,
) -> TransformerCall | None:
    """Masks of two dimensions, which are to be made a bias first, are not for us."""
    for mask in (attention_mask, encoder_attention_mask):
        if mask is not None and mask.ndim == 2:
            return None
    given = {
        "attention_mask": attention_mask,
        "encoder_hidden_states": encoder_hidden_states,
        "encoder_attention_mask": encoder_attention_mask,
        "timestep": timestep,
        "cross_attention_kwargs": cross_attention_kwargs,
        "class_labels": class_labels,
    }

    def answer(y: torch.Tensor) -> Any:
        if not return_dict:
            return (y,)
        output: Any = vars(sys.modules[type(module).__module__])["Transformer2DModelOutput"]
        return output(sample=y)

    return TransformerCall(hidden_states, lambda _: given, answer)


def block(found: Findings, module: Any) -> Block | None:
    children = ("norm1", "attn1", "norm2", "attn2", "norm3", "ff")
    if not found.block(module, "block", ("BasicTransformerBlock",), children, root=True):
        return None
    expected = {"norm_type": "layer_norm", "only_cross_attention": False, "pos_embed": None}
    found.settings(module, "block", expected)
    found.settings(module, "block", {"_chunk_size": None})
    norm1 = found.layer_norm(getattr(module, "norm1", None), "norm1")
    norm3 = found.layer_norm(getattr(module, "norm3", None), "norm3")
    attn2 = getattr(module, "attn2", None)
    norm2 = None
    if attn2 is not None:
        norm2 = found.layer_norm(getattr(module, "norm2", None), "norm2")
    if norm1 is None or norm3 is None or (attn2 is not None and norm2 is None):
        return None
    own, cross = module.attn1, attn2
    return Block(
        norm1,
        norm2,
        norm3,
        own,
        cross,
        module.ff,
        whole(found, "attn1", lambda part, name: _attention(part, name, own)),
        None
        if cross is None
        else whole(found, "attn2", lambda part, name: _attention(part, name, cross)),
        whole(found, "ff", lambda part, name: _feed_forward(part, name, module.ff)),
    )


def block_call(
    module: Any,
    hidden_states: Any,
    attention_mask: Any = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None,
    timestep: Any = None,
    cross_attention_kwargs: Any = None,
    class_labels: Any = None,
    added_cond_kwargs: Any = None,
) -> BlockCall | None:
    more = dict(cross_attention_kwargs or {})
    if more.pop("gligen", None) is not None:
        return None
    own = {"encoder_hidden_states": None, "attention_mask": attention_mask, **more}
    cross = {
        "encoder_hidden_states": encoder_hidden_states,
        "attention_mask": encoder_attention_mask,
        **more,
    }
    return BlockCall(
        hidden_states,
        encoder_hidden_states,
        own,
        cross,
        attention_mask is None and not more,
        encoder_attention_mask is None and not more,
    )


def _attention(found: Findings, name: str, module: Any) -> Attention | None:
    children = ("to_q", "to_k", "to_v", "to_out")
    if not found.block(module, name, ("Attention",), children):
        return None
    found.settings(module, name, _PLAIN_ATTENTION)
    found.watch(module, "processor", "heads", "scale")
    processor = getattr(module, "processor", None)
    if type(processor).__module__.startswith("lib_rocm_sd"):
        processor = getattr(processor, "replaced", processor)
    kind = type(processor).__name__
    if kind not in PROCESSORS or type(processor).__module__ != HOME:
        found.add(f"{name}.processor is a {kind} of {type(processor).__module__}")
        return None
    if PROCESSORS[kind] and getattr(module, "upcast_attention", False):
        found.add(f"{name}.processor computes in float32")
    for owner, key in code_of(processor):
        found.function(owner, key, f"{name}.processor")
    scale = getattr(module, "scale", None)
    if kind != TORCHS and scale != (module.to_q.out_features / module.heads) ** -0.5:
        found.add(f"{name}.scale is {scale}")
    out = found.listed(getattr(module, "to_out", None), f"{name}.to_out", 2)
    if out:
        found.no_dropout(out[1], f"{name}.to_out.1")
    q, k, v = (found.linear(getattr(module, key, None), f"{name}.{key}") for key in children[:3])
    last = found.linear(out[0], f"{name}.to_out.0") if out else None
    if q is None or k is None or v is None or last is None:
        return None
    return heads_of(found, Attention(q, k, v, last, module.heads))


def code_of(processor: Any) -> list[tuple[Any, str]]:
    """What a call of a known processor runs, each an owner and a name."""
    return [(type(processor), "__call__"), (nn.functional, "scaled_dot_product_attention")]


def _feed_forward(found: Findings, name: str, module: Any) -> FeedForward | None:
    if not found.block(module, name, ("FeedForward",), ("net",)):
        return None
    net = found.listed(getattr(module, "net", None), f"{name}.net", 2, 3)
    return gated(found, name, net)


def resample(found: Findings, module: Any) -> Resample | None:
    up = type(module).__name__ == "Upsample2D"
    name = "Upsample2D" if up else "Downsample2D"
    if not found.block(module, "sampler", (name,), ("conv", "Conv2d_0"), root=True):
        return None
    expected = {"use_conv": True, "use_conv_transpose": False, "norm": None, "interpolate": True}
    found.settings(module, "sampler", expected)
    conv = getattr(module, "conv", None)
    conv = getattr(module, "Conv2d_0", None) if conv is None else conv
    read = found.conv(conv, "conv", stride=1 if up else 2, padding=1)
    return None if read is None else Resample(read, up)


def resample_call(module: Any, hidden_states: Any, output_size: Any = None) -> ImageCall | None:
    """A size other than twice that of x is not for us."""
    if output_size is not None:
        height, width = hidden_states.shape[2:]
        if tuple(output_size) != (2 * height, 2 * width):
            return None
    return ImageCall(hidden_states)


def end(found: Findings, module: Any) -> Ends | None:
    """conv_in and conv_out; conv_norm_out, whose SiLU is another module's."""
    if isinstance(module, nn.GroupNorm):
        norm = found.group_norm(module, "norm")
        return None if norm is None else Ends(norm, False, None)
    conv = found.conv(module, "conv")
    return None if conv is None else Ends(None, False, conv)


def end_call(module: Any, input: Any) -> ImageCall | None:  # noqa: A002 - what torch calls it
    return ImageCall(input)
