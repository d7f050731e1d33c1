"""The blocks of diffusers' SD3Transformer2DModel, and of ComfyUI's and AUTOMATIC1111's MMDiT: their
parts, and what a call asks for.

Read in diffusers 0.42.1: models/attention.py, JointTransformerBlock; models/normalization.py;
models/attention_processor.py, JointAttnProcessor2_0. In Comfy-Org/ComfyUI a125cd84 (0.3.64):
comfy/ldm/modules/diffusionmodules/mmdit.py. In lshqqytiger/stable-diffusion-webui-amdgpu e61adddd:
modules/models/sd3/mmdit.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.dit.parts import (
    ATTENTION,
    FEED_FORWARD,
    OWN,
    FeedForward,
    Heads,
    Joint,
    Layer,
    Stream,
    TokensCall,
)
from lib_rocm_sd.hosts.read.findings import Findings, eps_of
from lib_rocm_sd.hosts.read.unet_diffusers import HOME, PLAIN_ATTENTION, code_of, processor_of
from lib_rocm_sd.modules.stand_in import UnknownModuleError
from lib_rocm_sd.ops.keys import described

CLASS = "JointTransformerBlock"
PROCESSOR = "JointAttnProcessor2_0"
_BOTH = ATTENTION + FEED_FORWARD
MODULATIONS = {
    "AdaLayerNormZero": _BOTH,
    "SD35AdaLayerNormZeroX": _BOTH + OWN,
    "AdaLayerNormContinuous": ("scale", "shift"),
    "ChromaAdaLayerNormZeroPruned": _BOTH,
}
"""Classes of a stream's first norm, and what each makes of the time embedding; the last is given
these rows in the embedding's place.
"""
NORMS = {"norm_q", "norm_k", "norm_added_q", "norm_added_k"}
ATTENTION_SETTINGS = {
    key: value
    for key, value in PLAIN_ATTENTION.items()
    if key not in {*NORMS, "add_k_proj", "added_kv_proj_dim", "scale_qk"}
}


def joint_call(
    module: Any,
    hidden_states: Any,
    encoder_hidden_states: Any,
    temb: Any,
    joint_attention_kwargs: Any = None,
) -> TokensCall:
    nothing_more(joint_attention_kwargs)
    x, context = hidden_states, encoder_hidden_states
    return tokens_call(x, context, temb, both)


def nothing_more(given: Any) -> None:
    """Further arguments of attention, as an IP-Adapter gives them, are not for us."""
    if given:
        raise UnknownModuleError((f"attention is given {', '.join(sorted(given))}",))


def both(context: torch.Tensor | None, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    return context, x


def tokens_call(
    x: Any,
    context: Any,
    embedding: Any,
    answer: Callable[..., Any],
    *rotary: Any,
    rows: bool = False,
    mask: Any = None,
) -> TokensCall:
    """UnknownModuleError where these do not go together. `rows`: the embedding has rows that
    modulate.
    """
    given = ((embedding, 3 if rows else 2), (context, 3))
    for each, ndim in given[: 1 if context is None else 2]:
        alike = type(each) is torch.Tensor and each.ndim == ndim and len(each) == len(x)
        if not alike or (each.dtype, each.device) != (x.dtype, x.device):
            raise apart(x=x, context=context, embedding=embedding)
    return TokensCall(x, context, embedding, answer, *rotary)._replace(mask=mask)


def apart(**given: Any) -> UnknownModuleError:
    """Says that a call's tensors do not go together."""
    return UnknownModuleError((f"its call is not of our form: {described(**given)}",))


def joint(found: Findings, module: Any) -> Joint | None:
    """The parts of a block; what is not as expected goes to `found`."""
    children = ("norm1", "attn", "norm2", "ff")
    both = (*children, *(f"{name}_context" for name in children if name != "attn"), "attn2")
    if not found.block(module, "block", (CLASS,), both, root=True):
        return None
    found.settings(module, "block", {"_chunk_size": None})
    attn = module.attn
    if not _is_plain(found, attn, "attn"):
        return None
    found.watch(attn, "heads")
    ends = bool(module.context_pre_only)
    mine, theirs = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")
    own = None
    if module.attn2 is not None:
        found.watch(module.attn2, "heads")
        if _is_plain(found, module.attn2, "attn2") and module.attn2.heads == attn.heads:
            own = heads_of(found, module.attn2, "attn2", mine, "to_out.0", ("norm_q", "norm_k"))
    first = heads_of(found, attn, "attn", mine, "to_out.0", ("norm_q", "norm_k"))
    out, norms = None if ends else "to_add_out", ("norm_added_q", "norm_added_k")
    second = heads_of(found, attn, "attn", theirs, out, norms)
    picture = stream_of(found, module, "", first)
    prompt = stream_of(found, module, "_context", second, ends)
    if picture is None or prompt is None or (module.attn2 is not None) != (own is not None):
        return None
    if (own is not None) != (OWN[0] in picture.rows) or (ends != (len(prompt.rows) == 2)):
        found.add("norm1 does not go with the attention")
        return None
    return fitting(found, Joint(picture, prompt, own, attn.heads))


def fitting(found: Findings, parts: Joint) -> Joint | None:
    """The parts, if all widths are those of the picture's tokens."""
    width = parts.picture.heads.to_qkv[0].in_features
    every = [parts.picture.heads, parts.prompt.heads, *([] if parts.own is None else [parts.own])]
    sizes = {size for each in every for size in each.widths}
    for stream in (parts.picture, parts.prompt):
        if stream.modulation is not None:
            each, rest = divmod(stream.modulation.out_features, len(stream.rows))
            sizes.add(each if not rest else -1)
        sizes.add(stream.heads.to_qkv[0].in_features)
    if sizes != {width} or parts.heads < 1 or width % parts.heads:
        found.add(f"{parts.heads} heads of {width}, and layers of {sorted(sizes)}")
        return None
    return parts


def _is_plain(found: Findings, module: Any, name: str) -> bool:
    """Whether it is diffusers' Attention with the processor whose arithmetic ours does."""
    layers = ("to_q", "to_k", "to_v", "to_out", "add_q_proj", "add_k_proj", "add_v_proj")
    if not found.block(module, name, ("Attention",), (*layers, "to_add_out", *NORMS)):
        return False
    found.settings(module, name, ATTENTION_SETTINGS)
    found.watch(module, "processor")
    processor = processor_of(module)
    kind = type(processor).__name__
    if kind != PROCESSOR or type(processor).__module__ != HOME:
        found.add(f"{name}.processor is a {kind} of {type(processor).__module__}")
        return False
    for owner, key in code_of(processor):
        found.function(owner, key, f"{name}.processor")
    return True


def heads_of(
    found: Findings,
    module: Any,
    name: str,
    layers: tuple[str, ...],
    out: str | None,
    norms: tuple[str, str],
) -> Heads | None:
    to_qkv = [found.layer(module, key, name) for key in layers]
    to_out = None if out is None else found.layer(module, out, name)
    if out == "to_out.0" and found.listed(module, "to_out", name, 2):
        found.no_dropout(module, "to_out.1", name)
    there = [getattr(module, key, None) is not None for key in norms]
    read = tuple(layer for layer in to_qkv if layer is not None)
    if len(read) < len(layers) or (out is not None and to_out is None):
        return None
    return Heads(module, read, to_out, *norms_of(found, module, name, norms, any(there)))


def wide_norms(found: Findings) -> None:
    """Notes a torch without what computes an RMSNorm of more columns than a head has, or whose
    squares are no wider than its input: torch 2.4's are inf from 256 on.
    """
    if not hasattr(nn.functional, "rms_norm"):
        found.add("this torch has no rms_norm")
    elif not nn.functional.rms_norm(torch.full((2,), 300.0, device="cpu").half(), (2,)).any():
        found.add("this torch's rms_norm overflows")


def norms_of(
    found: Findings, module: Any, name: str, keys: tuple[str, str], there: bool = True
) -> tuple[Any, Any, float]:
    """RMSNorms of queries and of keys, and their one eps; None, None and 0 where not `there`."""
    if not there:
        return None, None, 0.0
    norm_q, norm_k = (found.rms_norm(module, key, name) for key in keys)
    eps = eps_of(norm_q)
    if norm_q is None or norm_k is None or eps is None or eps != eps_of(norm_k):
        found.add(f"{name}: its {' and '.join(keys)} are unlike")
    return norm_q, norm_k, eps or 0.0


def stream_of(
    found: Findings, module: Any, suffix: str, heads: Heads | None, ends: bool = False
) -> Stream | None:
    name = f"norm1{suffix}"
    first = getattr(module, name, None)
    if not found.block(first, name, MODULATIONS, ("silu", "linear", "norm")):
        return None
    norm1, is_given = found.bare_norm(first, "norm", name), type(first).__name__.endswith("Pruned")
    modulation = None if is_given else modulation_of(found, first, name)
    norm2 = feed_forward = None
    if not ends:
        norm2 = found.bare_norm(module, f"norm2{suffix}")
        feed_forward = feed_forward_of(found, getattr(module, f"ff{suffix}", None), f"ff{suffix}")
    unread = not ends and (norm2 is None or feed_forward is None)
    unread |= modulation is None and not is_given
    if norm1 is None or heads is None or unread:
        return None
    rows = MODULATIONS[type(first).__name__]
    return Stream(modulation, rows, norm1, heads, norm2, feed_forward)


def modulation_of(found: Findings, norm: Any, name: str) -> Layer | None:
    """The layer of SiLU of the time embedding that a norm of diffusers' has."""
    found.silu(norm, "silu", name)
    return found.layer(norm, "linear", name)


def feed_forward_of(found: Findings, module: Any, name: str) -> FeedForward | None:
    """A net of GELU, dropout and Linear."""
    if not found.block(module, name, ("FeedForward",), ("net",)):
        return None
    net = found.listed(module, "net", name, 3)
    if not net or not found.block(net[0], f"{name}.net.0", ("GELU",), ("proj",)):
        return None
    found.settings(net[0], f"{name}.net.0", {"approximate": "tanh"})
    found.no_dropout(module, "net.1", name)
    up, down = found.layer(module, "net.0.proj", name), found.layer(module, "net.2", name)
    return None if up is None or down is None else FeedForward(up, down)


# ComfyUI's and AUTOMATIC1111's, which have a block for each stream beneath a block of both.

COMFYS_CLASS = "JointBlock"


def comfys_call(
    module: Any,
    context: Any,
    x: Any,
    c: Any,
    use_checkpoint: Any = True,
    transformer_options: Any = None,
) -> TokensCall:
    return tokens_call(x, context, c, both)


def comfys_joint(found: Findings, module: Any) -> Joint | None:
    """The parts of a block; what is not as expected goes to `found`."""
    if not found.block(module, "block", (COMFYS_CLASS,), ("context_block", "x_block"), root=True):
        return None
    home = sys.modules[type(module).__module__]
    mixing = "_block_mixing" if hasattr(home, "_block_mixing") else "block_mixing"
    found.function(home, mixing, "block")
    picture, prompt = module.x_block, module.context_block
    for name, each in (("x_block", picture), ("context_block", prompt)):
        children = ("norm1", "attn", "attn2", "norm2", "mlp", "adaLN_modulation")
        if not found.block(each, name, ("DismantledBlock",), children):
            return None
        found.settings(each, name, {"scale_mod_only": False})
    found.settings(picture, "x_block", {"pre_only": False})
    found.settings(prompt, "context_block", {"x_block_self_attn": False})
    own, twice = None, getattr(picture, "x_block_self_attn", False)
    rows = _BOTH + (OWN if twice else ())
    if twice:
        own = _comfys_heads(found, picture, "attn2", "x_block")
        if own is None:
            return None
    ends = bool(prompt.pre_only)
    first = _comfys_stream(found, picture, "x_block", rows)
    second = _comfys_stream(found, prompt, "context_block", _BOTH[:2] if ends else _BOTH, ends)
    if first is None or second is None:
        return None
    return fitting(found, Joint(first, second, own, picture.attn.num_heads))


def _comfys_stream(
    found: Findings, block: Any, name: str, rows: tuple[str, ...], ends: bool = False
) -> Stream | None:
    modulation = None
    if found.listed(block, "adaLN_modulation", name, 2):
        found.silu(block, "adaLN_modulation.0", name)
        modulation = found.layer(block, "adaLN_modulation.1", name)
    norm1, heads = found.bare_norm(block, "norm1", name), _comfys_heads(found, block, "attn", name)
    norm2 = feed_forward = None
    if not ends:
        norm2 = found.bare_norm(block, "norm2", name)
        feed_forward = comfys_feed_forward(found, getattr(block, "mlp", None), f"{name}.mlp")
    unread = not ends and (norm2 is None or feed_forward is None)
    if modulation is None or norm1 is None or heads is None or unread:
        return None
    return Stream(modulation, rows, norm1, heads, norm2, feed_forward)


def comfys_feed_forward(found: Findings, mlp: Any, name: str) -> FeedForward | None:
    """Two layers and GELU between them."""
    if not found.block(mlp, name, ("Mlp",), ("fc1", "act", "drop1", "norm", "fc2", "drop2")):
        return None
    found.gelu(mlp, "act", name)
    for dropout in ("drop1", "drop2", "norm"):
        found.no_dropout(mlp, dropout, name)
    up, down = (found.layer(mlp, layer, name) for layer in ("fc1", "fc2"))
    return None if up is None or down is None else FeedForward(up, down)


def _comfys_heads(found: Findings, block: Any, key: str, name: str) -> Heads | None:
    module: Any = getattr(block, key, None)
    name = f"{name}.{key}"
    children = ("qkv", "proj", "proj_drop", "ln_q", "ln_k")
    if not found.block(module, name, ("SelfAttention",), children):
        return None
    found.settings(module, name, {"num_heads": block.attn.num_heads})
    found.no_dropout(module, "proj_drop", name)
    qkv = found.layer(module, "qkv", name)
    ends = bool(module.pre_only)
    out = None if ends else found.layer(module, "proj", name)
    plain = [type(getattr(module, each, None)) is nn.Identity for each in ("ln_q", "ln_k")]
    norms = norms_of(found, module, name, ("ln_q", "ln_k"), not all(plain))
    if qkv is None or (out is None and not ends):
        return None
    return Heads(module, (qkv,), out, *norms)
