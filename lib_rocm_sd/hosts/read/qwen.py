"""Qwen-Image's blocks in diffusers and ComfyUI, whose classes have the same names and children:
their parts, and what a call asks for.

Read in diffusers 0.35.2 and 0.42.1: models/transformers/transformer_qwenimage.py. In
Comfy-Org/ComfyUI a125cd84 (0.3.64): comfy/ldm/qwen_image/model.py.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from lib_rocm_sd.dit.parts import ATTENTION, FEED_FORWARD, Joint, Stream, TokensCall
from lib_rocm_sd.hosts.read.dit import (
    ATTENTION_SETTINGS,
    NORMS,
    both,
    feed_forward_of,
    fitting,
    heads_of,
    tokens_call,
)
from lib_rocm_sd.hosts.read.findings import Findings
from lib_rocm_sd.hosts.read.flux import CLIP, plain_processor
from lib_rocm_sd.hosts.read.lengths import key_lengths
from lib_rocm_sd.modules.stand_in import UnknownModuleError

CLASS = "QwenImageTransformerBlock"
PROCESSOR = "QwenDoubleStreamAttnProcessor2_0"
APPLIED = "image_mask"
"""A variable of it in versions that apply a mask of the prompt: 0.35.2 has none."""


def call(
    module: Any,
    hidden_states: Any,
    encoder_hidden_states: Any,
    encoder_hidden_states_mask: Any,
    temb: Any,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: Any = None,
    modulate_index: Any = None,
) -> TokensCall:
    """A call of diffusers' block. The mask, bool (N, words), leaves words out."""
    x, context = hidden_states, encoder_hidden_states
    for name, value in (
        ("a modulate_index", modulate_index),
        ("joint_attention_kwargs", joint_attention_kwargs or None),
    ):
        if value is not None:
            raise UnknownModuleError((f"it is given {name}",))
    rotary: tuple[Any, ...] = ()
    if image_rotary_emb is not None:
        factors = torch.cat(image_rotary_emb)
        if factors.dtype != torch.complex64 or factors.device != x.device or factors.ndim != 2:
            raise UnknownModuleError(("its rotary embedding is not complex64 (tokens, D / 2)",))
        rotary = tuple(e.repeat_interleave(2, 1)[None] for e in (factors.real, factors.imag))
    mask = encoder_hidden_states_mask
    if mask is not None:
        mask = _mask_of(module, x, context, mask)
    return tokens_call(x, context, temb, both, *rotary, mask=mask)


def _mask_of(module: Any, x: Any, context: Any, words: Any) -> torch.Tensor:
    """All tokens of the picture, then some of the words: by their number, or one by one."""
    if APPLIED not in type(module.attn.processor).__call__.__code__.co_varnames:
        raise UnknownModuleError(("it is given a mask, which this diffusers ignores",))
    if words.dtype != torch.bool or words.shape != context.shape[:2]:
        shape = tuple(context.shape[:2])
        raise UnknownModuleError((f"its mask for the prompt is not bool {shape}",))
    lengths = key_lengths(words)
    if lengths is not None:
        return lengths + x.shape[1]
    return torch.cat((words.new_ones(x.shape[:2]), words), 1)[:, None]


def comfys_call(
    module: Any,
    hidden_states: Any,
    encoder_hidden_states: Any,
    encoder_hidden_states_mask: Any,
    temb: Any,
    image_rotary_emb: Any = None,
    transformer_options: Any = None,
) -> TokensCall:
    """A call of ComfyUI's block, which does nothing with the mask, and rounds matrices (N, tokens,
    1, D / 2, 2, 2) to the dtype of x.
    """
    x, context = hidden_states, encoder_hidden_states
    rotary = comfys_rotary_of(image_rotary_emb, x.shape[1] + context.shape[1])
    return tokens_call(x, context, temb, both, *rotary)


def comfys_rotary_of(pe: Any, tokens: int) -> tuple[torch.Tensor, ...]:
    """Matrices (N or 1, tokens, D / 2, 2, 2) in float32 of (N or 1, tokens, 1, ..), or nothing."""
    if pe is None:
        return ()
    if type(pe) is not torch.Tensor or pe.ndim != 6 or pe.shape[1:3] != (tokens, 1):
        raise UnknownModuleError((f"its rotary embedding is not (N, {tokens}, 1, ..)",))
    return (pe[:, :, 0].float(),)


def joint(found: Findings, module: Any) -> Joint | None:
    """The parts of a block; what is not as expected goes to `found`."""
    names = ("mod", "norm1", "norm2", "mlp")
    children = ("attn", *(f"{stream}_{name}" for stream in ("img", "txt") for name in names))
    if not found.block(module, "block", (CLASS,), children, root=True):
        return None
    found.settings(module, "block", {"zero_cond_t": False})
    attn, diffusers = module.attn, type(module).__module__.startswith("diffusers.")
    layers = ("to_q", "to_k", "to_v", "to_out", "add_q_proj", "add_k_proj", "add_v_proj")
    if not found.block(attn, "attn", ("Attention",), (*layers, "to_add_out", *NORMS)):
        return None
    found.watch(attn, "heads")
    if diffusers:
        found.settings(attn, "attn", ATTENTION_SETTINGS)
        if not plain_processor(found, attn, PROCESSOR, sys.modules[type(module).__module__]):
            return None
    first = heads_of(found, attn, "attn", layers[:3], "to_out.0", ("norm_q", "norm_k"))
    added = ("norm_added_q", "norm_added_k")
    second = heads_of(found, attn, "attn", layers[4:], "to_add_out", added)
    picture, prompt = _stream(found, module, "img", first), _stream(found, module, "txt", second)
    if picture is None or prompt is None:
        return None
    bounded = CLIP if diffusers else None
    return fitting(
        found, Joint(picture, prompt, None, attn.heads, not diffusers, bounded, diffusers)
    )


def _stream(found: Findings, block: Any, name: str, heads: Any) -> Stream | None:
    modulation = None
    if found.listed(block, f"{name}_mod", "", 2):
        found.silu(block, f"{name}_mod.0")
        modulation = found.layer(block, f"{name}_mod.1")
    norm1, norm2 = (found.bare_norm(block, f"{name}_{norm}") for norm in ("norm1", "norm2"))
    feed_forward = feed_forward_of(found, getattr(block, f"{name}_mlp"), f"{name}_mlp")
    if modulation is None or norm1 is None or norm2 is None:
        return None
    if heads is None or feed_forward is None:
        return None
    return Stream(modulation, ATTENTION + FEED_FORWARD, norm1, heads, norm2, feed_forward)
