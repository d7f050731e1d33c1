"""Z-Image's blocks in diffusers: their parts, and what a call asks for.

Read in diffusers 0.42.1: models/transformers/transformer_z_image.py.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from lib_rocm_sd.dit.parts import Heads, Sandwich, TokensCall
from lib_rocm_sd.hosts.read.dit import ATTENTION_SETTINGS, heads_of, tokens_call, wide_norms
from lib_rocm_sd.hosts.read.findings import Findings
from lib_rocm_sd.hosts.read.flux import plain_processor
from lib_rocm_sd.hosts.read.lengths import key_lengths
from lib_rocm_sd.modules.stand_in import UnknownModuleError

CLASS = "ZImageTransformerBlock"
_NORMS = ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")


def call(
    module: Any,
    x: Any,
    attn_mask: Any,
    freqs_cis: Any,
    adaln_input: Any = None,
    noise_mask: Any = None,
    adaln_noisy: Any = None,
    adaln_clean: Any = None,
) -> TokensCall:
    """The mask says which tokens count, bool (N, tokens)."""
    if noise_mask is not None:
        raise UnknownModuleError(("its tokens have modulations of two kinds",))
    tokens = tuple(x.shape[:2])
    mask: torch.Tensor | None = None
    if attn_mask is not None:
        if attn_mask.shape != tokens or attn_mask.dtype != torch.bool:
            raise UnknownModuleError((f"its attention has a mask that is not bool {tokens}",))
        lengths = key_lengths(attn_mask)
        mask = attn_mask[:, None] if lengths is None else lengths
    rotary: tuple[torch.Tensor, ...] = ()
    if freqs_cis is not None:
        if freqs_cis.dtype != torch.complex64 or freqs_cis.shape[:-1] != tokens:
            why = f"its rotary embedding is not complex64 {(*tokens, 'D / 2')}"
            raise UnknownModuleError((why,))
        rotary = tuple(each.repeat_interleave(2, 2) for each in (freqs_cis.real, freqs_cis.imag))
    if module.modulation:
        return tokens_call(x, None, adaln_input, lambda made: made, *rotary, mask=mask)
    return TokensCall(x, None, None, lambda made: made, *rotary)._replace(mask=mask)


def sandwich(found: Findings, module: Any) -> Sandwich | None:
    """The parts of a block; what is not as expected goes to `found`."""
    children = ("attention", "feed_forward", *_NORMS, "adaLN_modulation")
    if not found.block(module, "block", (CLASS,), children, root=True):
        return None
    wide_norms(found)
    norms = tuple(found.rms_norm(module, key) for key in _NORMS)
    heads = _heads_of(found, module.attention)
    ff, layers = module.feed_forward, ("w1", "w3", "w2")
    if not found.block(ff, "feed_forward", ("FeedForward",), layers):
        return None
    found.function(type(ff), "_forward_silu_gating", "feed_forward")
    up, gated, down = (found.layer(ff, key, "feed_forward") for key in layers)
    modulation = None
    if module.modulation and found.listed(module, "adaLN_modulation", "", 1):
        modulation = found.layer(module, "adaLN_modulation.0")
    if heads is None or up is None or gated is None or down is None or None in norms:
        return None
    width, count = down.out_features, module.attention.heads
    sizes = heads.widths | {layer.in_features for layer in (*heads.to_qkv, up, gated)}
    sizes |= {norm.weight.numel() for norm in norms}
    alike = up.out_features == gated.out_features == down.in_features
    rows = width if modulation is None else modulation.out_features / 4
    if sizes | {rows} != {width} or not alike or count < 1 or width % count:
        found.add(f"{count} heads of {width}, and layers of {sorted(sizes)}")
        return None
    return Sandwich(modulation, norms, heads, (up, gated), down, count)


def _heads_of(found: Findings, attn: Any) -> Heads | None:
    layers, norms = ("to_q", "to_k", "to_v"), ("norm_q", "norm_k")
    if not found.block(attn, "attention", ("Attention",), (*layers, "to_out", *norms)):
        return None
    found.watch(attn, "heads")
    found.settings(attn, "attention", ATTENTION_SETTINGS)
    home = sys.modules["diffusers.models.transformers.transformer_z_image"]
    if not plain_processor(found, attn, "ZSingleStreamAttnProcessor", home):
        return None
    return heads_of(found, attn, "attention", layers, "to_out.0", norms)
