"""The blocks of diffusers' UNet2DConditionModel: their parts, and what a call asks for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

import lib_rocm_sd.hosts.read.peft  # noqa: F401 - knows the layers of adapters
from lib_rocm_sd.hosts.read.findings import Findings
from lib_rocm_sd.hosts.read.unet_ldm import OUTPUTS, Ldm, Options, end_call
from lib_rocm_sd.unet.parts import (
    Attention,
    Block,
    BlockCall,
    ImageAttention,
    ImageAttentionCall,
    ImageCall,
    KeysValues,
    More,
    Region,
    Resnet,
    TransformerCall,
)

PROCESSORS = {
    "AttnProcessor2_0": False,
    "XFormersAttnProcessor": False,
    "AttnProcessor": True,
    "SlicedAttnProcessor": True,
}
"""The processors whose arithmetic ours does, and whether each heeds `upcast_attention`."""
FUSED = "FusedAttnProcessor2_0"
"""The same with one product for queries, keys and values, or for keys and values. Who fuses leaves
the layers of before, and who goes back leaves the fused ones: only the processor says which count.
"""
IP_ADAPTERS = {"IPAdapterAttnProcessor2_0": False, "IPAdapterAttnProcessor": True}
"""The same with attentions to images, which are added; as PROCESSORS."""
_REGIONS, _MASKS = "ip_adapter_masks", "IPAdapterMaskProcessor"
"""An argument of all attentions, which only those of IP_ADAPTERS take, and what makes weights of
pixels of it.
"""
HOME = "diffusers.models.attention_processor"
TORCHS = "AttnProcessor2_0"
"""It calls torch's attention without a scale, whatever that of its module."""
_POSITIONS = "SinusoidalPositionalEmbedding"
_ADDS = "AttnAddedKVProcessor2_0"
_PLAIN_RESNET = {"pre_norm": True, "output_scale_factor": 1.0}
_MODULATED = "scale_shift"
_RESIZED = ("upsample", "downsample")
PLAIN_ATTENTION = {
    "norm_q": None,
    "norm_k": None,
    "norm_cross": None,
    "group_norm": None,
    "spatial_norm": None,
    "add_k_proj": None,
    "added_kv_proj_dim": None,
    "residual_connection": False,
    "rescale_output_factor": 1.0,
    "is_causal": False,
    "scale_qk": True,
}


def resnet_call(module: Any, input_tensor: Any, temb: Any = None) -> ImageCall | None:
    return ImageCall(input_tensor, temb)


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
    positions = getattr(getattr(module, "pos_embed", None), "pe", None)
    if more.pop("gligen", None) is not None or not _places(positions, hidden_states):
        return None
    context = encoder_hidden_states
    read = context if getattr(module, "only_cross_attention", False) else None
    own = {"encoder_hidden_states": read, "attention_mask": attention_mask, **more}
    cross = {"encoder_hidden_states": context, "attention_mask": encoder_attention_mask, **more}
    regions = more.pop(_REGIONS, None)
    plain_cross, added = not more, None
    processor = processor_of(module.attn2) if module.attn2 is not None else None
    if type(processor).__name__ in IP_ADAPTERS:
        added = _of_images(processor, context, regions)
        plain_cross = plain_cross and added is not None
    return BlockCall(
        hidden_states,
        context[0] if added is not None else context,
        own,
        cross,
        attention_mask is None and not more and not isinstance(read, tuple),
        plain_cross,
        encoder_attention_mask,
        added or (),
        positions=positions,
    )


def _places(positions: Any, x: Any) -> bool:
    """Whether they can be added to x (N, tokens, C), or there are none."""
    if positions is None:
        return True
    fits = (positions.dtype, positions.device, positions.shape[-1]) == (
        x.dtype,
        x.device,
        x.shape[-1],
    )
    return fits and x.ndim == 3 and positions.shape[1] >= x.shape[1]


def _look_at_positions(found: Findings, module: Any) -> None:
    """Notes what does not add a tensor of its own, as AnimateDiff's motion modules have it."""
    cls = type(module)
    if (cls.__module__, cls.__name__) != ("diffusers.models.embeddings", _POSITIONS):
        found.add(f"pos_embed is a {cls.__name__}")
        return
    found.untouched(module, "pos_embed")
    found.class_forward(cls, "pos_embed")


def _of_images(processor: Any, context: Any, regions: Any) -> tuple[More, ...] | None:
    """The attentions that an IP-Adapter adds; None for what is not as its processor documents it,
    which may be an error.
    """
    scales, count = processor.scale, len(processor.to_k_ip)
    regions = [None] * count if regions is None else regions
    images = context[1] if isinstance(context, tuple) and len(context) == 2 else ()
    if not all(isinstance(each, list) and len(each) == count for each in (images, scales, regions)):
        return None
    found = []
    for number, (image, scale, mask) in enumerate(zip(images, scales, regions, strict=True)):
        many = scale if isinstance(scale, list) else [scale]
        if not all(isinstance(each, (int, float)) for each in many):
            return None
        if mask is None:
            if many is scale:
                return None
            found.append(More(number, image, scale))
            continue
        masks = mask.shape if isinstance(mask, torch.Tensor) else ()
        if len(masks) != 4 or image.ndim != 4 or masks[:2] != (1, image.shape[1]):
            return None
        many = many if many is scale else many * masks[1]
        if len(many) != masks[1]:
            return None
        weigh = partial(_weighed, processor)
        found += [More(number, image, s, Region(mask, i, weigh)) for i, s in enumerate(many)]
    return tuple(each for each in found if each.scale != 0)


def _weighed(processor: Any, mask: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    """What diffusers makes of one mask (1, H, W) of an image: (N, tokens, 1)."""
    home: Any = vars(sys.modules[type(processor).__module__])[_MASKS]
    made: torch.Tensor = home.downsample(mask, batch, tokens, 1)
    return made


def image_attention_call(
    module: Any,
    hidden_states: Any,
    encoder_hidden_states: Any = None,
    attention_mask: Any = None,
    **more: Any,
) -> ImageAttentionCall | None:
    """A mask, and a context that does not fit, are not for us."""
    x, context = hidden_states, encoder_hidden_states
    if attention_mask is not None or more or not isinstance(context, torch.Tensor):
        return None
    same = (context.dtype, context.device, len(context)) == (x.dtype, x.device, len(x))
    return ImageAttentionCall(x, context) if same and context.ndim == 3 else None


def is_image_attention(module: nn.Module) -> bool:
    """Whether it is one of Kandinsky's, amid a UNet's residual blocks."""
    named = (type(module).__module__, type(module).__name__) == (HOME, "Attention")
    keys = ("add_k_proj", "group_norm")
    return named and all(getattr(module, key, None) is not None for key in keys)


def image_attention(found: Findings, module: Any) -> ImageAttention | None:
    """Attention as AttnAddedKVProcessor2_0 computes it, which calls torch's without a scale."""
    added, layers = ("add_k_proj", "add_v_proj"), ("to_q", "to_k", "to_v")
    children = ("group_norm", *layers, *added, "to_out", "processor")
    if not found.block(module, "attention", ("Attention",), children, root=True):
        return None
    expected = {"norm_cross": None, "spatial_norm": None, "only_cross_attention": False}
    found.settings(module, "attention", expected)
    found.watch(module, "processor", "heads")
    processor = processor_of(module)
    if (type(processor).__module__, type(processor).__name__) != (HOME, _ADDS):
        found.add(f"its processor is a {type(processor).__name__}")
        return None
    for owner, key in code_of(processor):
        found.function(owner, key, "processor")
    if not found.listed(module, "to_out", "", 2):
        return None
    found.no_dropout(module, "to_out.1")
    norm, heads = found.group_norm(module, "group_norm"), module.heads
    read = [found.linear(module, key) for key in (*layers, *added, "to_out.0")]
    linear = [each for each in read if each is not None]
    if norm is None or len(linear) < len(read):
        return None
    *five, out = linear
    widths = {each.out_features for each in five} | {out.in_features}
    if len(widths) > 1 or heads < 1 or out.in_features % heads:
        found.add(f"{heads} heads of queries, keys and values {sorted(widths)} wide")
        return None
    q, k, v, *both = five
    return ImageAttention(
        norm, Attention(q, KeysValues((k, v)), out, heads), KeysValues(tuple(both))
    )


def resample_call(module: Any, hidden_states: Any, output_size: Any = None) -> ImageCall | None:
    """A size other than twice that of x is not for us."""
    if output_size is not None:
        height, width = hidden_states.shape[2:]
        if tuple(output_size) != (2 * height, 2 * width):
            return None
    return ImageCall(hidden_states)


def code_of(processor: Any) -> list[tuple[Any, str]]:
    """What a call of a known processor runs, each an owner and a name."""
    return [(type(processor), "__call__"), (nn.functional, "scaled_dot_product_attention")]


class Diffusers(Ldm):
    """UNet2DConditionModel, whose blocks have grown out of ldm's."""

    classes: ClassVar[tuple[str, ...]] = (
        *("ResnetBlock2D", "Transformer2DModel", "BasicTransformerBlock"),
        *("Upsample2D", "Downsample2D"),
    )
    ends: ClassVar[tuple[str, ...]] = ("conv_in", "conv_norm_out", "conv_out", *OUTPUTS)
    transformer_settings: ClassVar[Options] = {"is_input_continuous": True}
    block_settings: ClassVar[Options] = {
        "norm_type": "layer_norm",
        "_chunk_size": None,
    }
    sampler_settings: ClassVar[Options] = {
        "use_conv": True,
        "use_conv_transpose": False,
        "norm": None,
        "interpolate": True,
    }
    block_children: ClassVar[tuple[str, ...]] = (*Ldm.block_children, "pos_embed")
    may_lack_cross: ClassVar[bool] = True
    net_lengths: ClassVar[tuple[int, ...]] = (2, 3)
    up_convs: ClassVar[tuple[str, ...]] = ("conv", "Conv2d_0")
    down_convs: ClassVar[tuple[str, ...]] = ("conv", "Conv2d_0")
    calls: ClassVar[Mapping[str, Callable[..., Any]]] = {
        "resnet": resnet_call,
        "transformer": transformer_call,
        "block": block_call,
        "resample": resample_call,
        "end": end_call,
    }

    def resnet(self, found: Findings, module: Any) -> Resnet | None:
        layers = ("norm1", "conv1", "time_emb_proj", "norm2", "dropout", "conv2", "nonlinearity")
        if not self.begins(found, module, "block", 0, (*layers, "conv_shortcut", *_RESIZED)):
            return None
        found.settings(module, "block", _PLAIN_RESNET)
        modulates = getattr(module, "time_embedding_norm", "") == _MODULATED
        if not modulates:
            found.settings(module, "block", {"time_embedding_norm": "default"})
        found.watch(module, *_RESIZED)
        there = [key for key in _RESIZED if getattr(module, key, None) is not None]
        resize = self.resizes(found, module, there[0]) if there else ""
        found.silu(module, "nonlinearity")
        found.no_dropout(module, "dropout")
        norm1, conv1 = found.group_norm(module, "norm1"), found.conv(module, "conv1")
        norm2, conv2 = found.group_norm(module, "norm2"), found.conv(module, "conv2")
        embed = shortcut = None
        if getattr(module, "time_emb_proj", None) is not None:
            embed = found.linear(module, "time_emb_proj")
        if getattr(module, "conv_shortcut", None) is not None:
            shortcut = found.conv(module, "conv_shortcut", kernel=1)
        if norm1 is None or conv1 is None or norm2 is None or conv2 is None:
            return None
        if modulates and embed is None:
            found.add("scales and shifts without a time embedding")
            return None
        silu = not getattr(module, "skip_time_act", False)
        return Resnet(norm1, conv1, embed, silu, norm2, conv2, shortcut, modulates, resize)

    def block(self, found: Findings, module: Any) -> Block | None:
        made, crosses = super().block(found, module), getattr(module, "only_cross_attention", False)
        positions = getattr(module, "pos_embed", None)
        if positions is not None:
            _look_at_positions(found, positions)
        return replace(made, crosses_twice=True) if made is not None and crosses else made

    def is_plain_attention(self, found: Findings, module: Any, name: str) -> bool:
        """The same, with a processor whose arithmetic ours does."""
        children = ("to_q", "to_k", "to_v", "to_qkv", "to_kv", "to_out", "processor")
        if not found.block(module, name, ("Attention",), children):
            return False
        found.settings(module, name, PLAIN_ATTENTION)
        found.watch(module, "processor")
        processor = processor_of(module)
        kind = type(processor).__name__
        known = {**PROCESSORS, FUSED: False, **IP_ADAPTERS}
        if kind not in known or type(processor).__module__ != HOME:
            found.add(f"{name}.processor is a {kind} of {type(processor).__module__}")
            return False
        if known[kind] and getattr(module, "upcast_attention", False):
            found.add(f"{name}.processor computes in float32")
        for owner, key in code_of(processor):
            found.function(owner, key, f"{name}.processor")
        return True

    def attention(self, found: Findings, module: Any, name: str) -> Attention | None:
        """The same, and the layers for images of an IP-Adapter, which are its processor's."""
        made, processor = super().attention(found, module, name), processor_of(module)
        if made is None or type(processor).__name__ not in IP_ADAPTERS:
            return made
        name, lists = f"{name}.processor", ("to_k_ip", "to_v_ip")
        kind = (type(processor).__name__,)
        if not found.block(processor, name, kind, lists, own_forward=False):
            return None
        keys, values = (found.listed(processor, key, name) for key in lists)
        read = []
        for number in range(max(len(keys), len(values))):
            layers = [found.linear(processor, f"{key}.{number}", name) for key in lists]
            read.append(KeysValues(tuple(layer for layer in layers if layer is not None)))
        widths = {layer.out_features for each in read for layer in each.layers}
        if any(len(each.layers) < 2 for each in read) or widths - {made.to_out.in_features}:
            found.add(f"{name} makes keys and values {sorted(widths)} wide")
            return None
        return replace(made, to_kv_more=tuple(read))

    def projections(self, module: Any) -> tuple[str, ...]:
        if type(processor_of(module)).__name__ != FUSED:
            return super().projections(module)
        return ("to_q", "to_kv") if module.is_cross_attention else ("to_qkv",)

    def is_scaled(self, module: Any) -> bool:
        return not type(processor_of(module)).__name__.endswith(TORCHS)


def processor_of(attention: Any) -> Any:
    """The one that diffusers gave it, where ours is in its place."""
    processor = getattr(attention, "processor", None)
    ours = type(processor).__module__.startswith("lib_rocm_sd")
    return getattr(processor, "replaced", processor) if ours else processor
