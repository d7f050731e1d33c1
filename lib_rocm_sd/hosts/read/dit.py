"""The blocks of diffusers' SD3Transformer2DModel: their parts, and what a call asks for.

Read in diffusers 0.42.1: models/attention.py, JointTransformerBlock; models/normalization.py;
models/attention_processor.py, JointAttnProcessor2_0.
"""

from __future__ import annotations

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
    JointCall,
    Stream,
)
from lib_rocm_sd.hosts.read.findings import Findings
from lib_rocm_sd.hosts.read.unet_diffusers import HOME, PLAIN_ATTENTION, code_of, processor_of
from lib_rocm_sd.modules.stand_in import UnknownModuleError

CLASS = "JointTransformerBlock"
PROCESSOR = "JointAttnProcessor2_0"
_BOTH = ATTENTION + FEED_FORWARD
MODULATIONS = {
    "AdaLayerNormZero": _BOTH,
    "SD35AdaLayerNormZeroX": _BOTH + OWN,
    "AdaLayerNormContinuous": ("scale", "shift"),
}
"""Classes of a stream's first norm, and what each makes of the time embedding."""
_NORMS = {"norm_q", "norm_k", "norm_added_q", "norm_added_k"}
_SETTINGS = {
    key: value
    for key, value in PLAIN_ATTENTION.items()
    if key not in {*_NORMS, "add_k_proj", "added_kv_proj_dim", "scale_qk"}
}


def joint_call(
    module: Any,
    hidden_states: Any,
    encoder_hidden_states: Any,
    temb: Any,
    joint_attention_kwargs: Any = None,
) -> JointCall | None:
    """Further arguments of attention, as an IP-Adapter gives them, are not for us."""
    if joint_attention_kwargs:
        given = ", ".join(sorted(joint_attention_kwargs))
        raise UnknownModuleError((f"attention is given {given}",))
    x, context = hidden_states, encoder_hidden_states
    for each, ndim in ((context, 3), (temb, 2)):
        alike = type(each) is torch.Tensor and each.ndim == ndim and len(each) == len(x)
        if not alike or (each.dtype, each.device) != (x.dtype, x.device):
            return None
    return JointCall(x, context, temb, lambda text, image: (text, image))


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
            own = _heads(found, module.attn2, "attn2", mine, "to_out.0", ("norm_q", "norm_k"))
    first = _heads(found, attn, "attn", mine, "to_out.0", ("norm_q", "norm_k"))
    out, norms = None if ends else "to_add_out", ("norm_added_q", "norm_added_k")
    second = _heads(found, attn, "attn", theirs, out, norms)
    picture = _stream(found, module, "", first)
    prompt = _stream(found, module, "_context", second, ends)
    if picture is None or prompt is None or (module.attn2 is not None) != (own is not None):
        return None
    if (own is not None) != (OWN[0] in picture.rows) or (ends != (len(prompt.rows) == 2)):
        found.add("norm1 does not go with the attention")
        return None
    return _fitting(found, Joint(picture, prompt, own, attn.heads))


def _fitting(found: Findings, parts: Joint) -> Joint | None:
    """The parts, if all widths are those of the picture's tokens."""
    width = parts.picture.heads.to_q.in_features
    every = [parts.picture.heads, parts.prompt.heads, *([] if parts.own is None else [parts.own])]
    sizes = {layer.out_features for each in every for layer in (each.to_q, each.to_k, each.to_v)}
    for stream in (parts.picture, parts.prompt):
        each, rest = divmod(stream.modulation.out_features, len(stream.rows))
        sizes.add(each if not rest else -1)
        sizes.add(stream.heads.to_q.in_features)
    if sizes != {width} or parts.heads < 1 or width % parts.heads:
        found.add(f"{parts.heads} heads of {width}, and layers of {sorted(sizes)}")
        return None
    return parts


def _is_plain(found: Findings, module: Any, name: str) -> bool:
    """Whether it is diffusers' Attention with the processor whose arithmetic ours does."""
    layers = ("to_q", "to_k", "to_v", "to_out", "add_q_proj", "add_k_proj", "add_v_proj")
    if not found.block(module, name, ("Attention",), (*layers, "to_add_out", *_NORMS)):
        return False
    found.settings(module, name, _SETTINGS)
    found.watch(module, "processor")
    processor = processor_of(module)
    kind = type(processor).__name__
    if kind != PROCESSOR or type(processor).__module__ != HOME:
        found.add(f"{name}.processor is a {kind} of {type(processor).__module__}")
        return False
    for owner, key in code_of(processor):
        found.function(owner, key, f"{name}.processor")
    return True


def _heads(
    found: Findings,
    module: Any,
    name: str,
    layers: tuple[str, ...],
    out: str | None,
    norms: tuple[str, str],
) -> Heads | None:
    q, k, v = (found.linear(module, key, name) for key in layers)
    to_out = None if out is None else found.linear(module, out, name)
    if out == "to_out.0" and found.listed(module, "to_out", name, 2):
        found.no_dropout(module, "to_out.1", name)
    there = [getattr(module, key, None) is not None for key in norms]
    if any(there) and not all(there):
        found.add(f"{name} has one of {' and '.join(norms)}")
    norm_q, norm_k = (
        found.rms_norm(module, key, name) if is_there else None
        for key, is_there in zip(norms, there, strict=True)
    )
    if q is None or k is None or v is None or (out is not None and to_out is None):
        return None
    if any(there) and (norm_q is None or norm_k is None or norm_q.eps != norm_k.eps):
        found.add(f"{name}: its {' and '.join(norms)} are unlike")
    return Heads(q, k, v, to_out, norm_q, norm_k)


def _stream(
    found: Findings, module: Any, suffix: str, heads: Heads | None, ends: bool = False
) -> Stream | None:
    name = f"norm1{suffix}"
    first = getattr(module, name, None)
    if not found.block(first, name, MODULATIONS, ("silu", "linear", "norm")):
        return None
    found.silu(first, "silu", name)
    modulation, norm1 = found.linear(first, "linear", name), found.bare_norm(first, "norm", name)
    norm2 = feed_forward = None
    if not ends:
        norm2 = found.bare_norm(module, f"norm2{suffix}")
        feed_forward = _feed_forward(found, getattr(module, f"ff{suffix}", None), f"ff{suffix}")
    unread = not ends and (norm2 is None or feed_forward is None)
    if modulation is None or norm1 is None or heads is None or unread:
        return None
    rows = MODULATIONS[type(first).__name__]
    return Stream(modulation, rows, norm1, heads, norm2, feed_forward)


def _feed_forward(found: Findings, module: Any, name: str) -> FeedForward | None:
    """A net of GELU, dropout and Linear."""
    if not found.block(module, name, ("FeedForward",), ("net",)):
        return None
    net = found.listed(module, "net", name, 3)
    if not net or not found.block(net[0], f"{name}.net.0", ("GELU",), ("proj",)):
        return None
    found.settings(net[0], f"{name}.net.0", {"approximate": "tanh"})
    found.no_dropout(module, "net.1", name)
    up, down = found.linear(module, "net.0.proj", name), found.linear(module, "net.2", name)
    return None if up is None or down is None else FeedForward(up, down)


def is_joint(module: nn.Module) -> bool:
    """Whether a module is such a block, by its class or one that it is derived from."""
    mro = type(module).__mro__
    return any(c.__name__ == CLASS and c.__module__.startswith("diffusers.") for c in mro)
