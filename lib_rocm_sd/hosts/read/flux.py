"""Flux's and Chroma's double and single blocks in diffusers, ComfyUI and Forge: their parts, and
what a call asks for.

Read in diffusers 0.35.2 and 0.42.1: models/transformers/transformer_flux.py; models/embeddings.py,
apply_rotary_emb. In 0.42.1: models/transformers/transformer_chroma.py. In Comfy-Org/ComfyUI
a125cd84 (0.3.64): comfy/ldm/flux/layers.py, math.py; comfy/ldm/chroma/layers.py. In
lllyasviel/stable-diffusion-webui-forge dfdcbab6: backend/nn/flux.py, chroma.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.dit.parts import (
    ATTENTION,
    FEED_FORWARD,
    Bounded,
    FeedForward,
    Heads,
    Joint,
    Layer,
    Single,
    Stream,
    TokensCall,
)
from lib_rocm_sd.hosts.read.dit import (
    both,
    fitting,
    heads_of,
    modulation_of,
    norms_of,
    nothing_more,
    stream_of,
    tokens_call,
)
from lib_rocm_sd.hosts.read.findings import Findings
from lib_rocm_sd.hosts.read.unet_diffusers import code_of, processor_of
from lib_rocm_sd.modules.stand_in import UnknownModuleError

DOUBLES = ("FluxTransformerBlock", "ChromaTransformerBlock")
SINGLES = ("FluxSingleTransformerBlock", "ChromaSingleTransformerBlock")
_SINGLE_NORMS = ("AdaLayerNormZeroSingle", "ChromaAdaLayerNormZeroSinglePruned")
PROCESSOR = "FluxAttnProcessor"
CLIP: Bounded = partial(torch.clamp_, min=-65504, max=65504)
_COMFYS: Bounded = partial(torch.nan_to_num_, nan=0.0)
_FORGES: Bounded = partial(torch.clamp_, min=-32768.0, max=32768.0)
"""What each host does in fp16 with a result that may overflow."""


def rotary_of(image_rotary_emb: Any, x: torch.Tensor, tokens: int) -> tuple[Any, ...]:
    """Cosines and sines (1, tokens, D) of what diffusers gives a block, or nothing."""
    if image_rotary_emb is None:
        return ()
    if not isinstance(image_rotary_emb, tuple | list) or len(image_rotary_emb) != 2:
        raise UnknownModuleError(("its rotary embedding is not a pair of cosines and sines",))
    for each in image_rotary_emb:
        if type(each) is not torch.Tensor or each.ndim != 2 or len(each) != tokens:
            raise UnknownModuleError((f"its rotary embedding is not ({tokens}, D)",))
        _check(each, x)
    cos, sin = image_rotary_emb
    return cos[None], sin[None]


def _check(rotary: torch.Tensor, x: torch.Tensor) -> None:
    if rotary.dtype != torch.float32 or rotary.device != x.device:
        what = f"{str(rotary.dtype).removeprefix('torch.')} on {rotary.device}"
        raise UnknownModuleError((f"its rotary embedding is {what}",))


def double_call(
    module: Any,
    hidden_states: Any,
    encoder_hidden_states: Any,
    temb: Any,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: Any = None,
) -> TokensCall:
    return _diffusers(
        hidden_states, encoder_hidden_states, temb, image_rotary_emb, joint_attention_kwargs, both
    )


def single_call(
    module: Any,
    hidden_states: Any,
    encoder_hidden_states: Any,
    temb: Any,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: Any = None,
) -> TokensCall:
    words = encoder_hidden_states.shape[1]

    def parted(made: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return made[:, :words], made[:, words:]

    return _diffusers(
        hidden_states, encoder_hidden_states, temb, image_rotary_emb, joint_attention_kwargs, parted
    )


def _diffusers(
    x: Any,
    context: Any,
    embedding: Any,
    rotary: Any,
    more: Any,
    answer: Callable[..., Any],
    mask: Any = None,
    rows: bool = False,
) -> TokensCall:
    """`mask` (N, tokens), of which Chroma's blocks make one of each two tokens: where it is not
    bool, pairs of tokens that count have one added to their scores.
    """
    nothing_more(more)
    tokens = x.shape[1] + (0 if context is None else context.shape[1])
    if mask is not None and (
        mask.shape != (len(x), tokens) or mask.dtype not in (torch.bool, x.dtype)
    ):
        what = f"{str(mask.dtype).removeprefix('torch.')} {tuple(mask.shape)}"
        raise UnknownModuleError((f"attention is given a mask {what}",))
    turned = rotary_of(rotary, x, tokens)
    return tokens_call(x, context, embedding, answer, *turned, rows=rows, mask=mask)


def chroma_double_call(
    module: Any,
    hidden_states: Any,
    encoder_hidden_states: Any,
    temb: Any,
    image_rotary_emb: Any = None,
    attention_mask: Any = None,
    joint_attention_kwargs: Any = None,
) -> TokensCall:
    given = hidden_states, encoder_hidden_states, temb, image_rotary_emb, joint_attention_kwargs
    return _diffusers(*given, both, attention_mask, rows=True)


def chroma_single_call(
    module: Any,
    hidden_states: Any,
    temb: Any,
    image_rotary_emb: Any = None,
    attention_mask: Any = None,
    joint_attention_kwargs: Any = None,
) -> TokensCall:
    given = hidden_states, None, temb, image_rotary_emb, joint_attention_kwargs
    return _diffusers(*given, lambda made: made, attention_mask, rows=True)


def double(found: Findings, module: Any) -> Joint | None:
    """The parts of diffusers' FluxTransformerBlock, or Chroma's, whose modulations are given; what
    is not as expected goes to `found`.
    """
    children = ("norm1", "norm2", "ff", "norm1_context", "norm2_context", "ff_context", "attn")
    if not found.block(module, "block", DOUBLES, children, root=True):
        return None
    attn = module.attn
    if not _is_plain(found, attn):
        return None
    fused = bool(attn.fused_projections)
    mine = ("to_qkv",) if fused else ("to_q", "to_k", "to_v")
    theirs = ("to_added_qkv",) if fused else ("add_q_proj", "add_k_proj", "add_v_proj")
    first = heads_of(found, attn, "attn", mine, "to_out.0", ("norm_q", "norm_k"))
    added = ("norm_added_q", "norm_added_k")
    second = heads_of(found, attn, "attn", theirs, "to_add_out", added)
    picture = stream_of(found, module, "", first)
    prompt = stream_of(found, module, "_context", second)
    if picture is None or prompt is None:
        return None
    return fitting(found, Joint(picture, prompt, None, attn.heads, True, CLIP))


def single(found: Findings, module: Any) -> Single | None:
    """The parts of diffusers' FluxSingleTransformerBlock, or Chroma's, likewise."""
    children = ("norm", "proj_mlp", "act_mlp", "proj_out", "attn")
    if not found.block(module, "block", SINGLES, children, root=True):
        return None
    attn, norm = module.attn, module.norm
    plain = _is_plain(found, attn)
    if not found.block(norm, "norm", _SINGLE_NORMS, ("silu", "linear", "norm")):
        return None
    is_given = type(norm).__name__ == _SINGLE_NORMS[1]
    found.gelu(module, "act_mlp")
    layers = ("to_qkv",) if plain and attn.fused_projections else ("to_q", "to_k", "to_v")
    heads = heads_of(found, attn, "attn", layers, None, ("norm_q", "norm_k")) if plain else None
    up = found.layer(module, "proj_mlp")
    if heads is not None and up is not None:
        heads = replace(heads, to_qkv=(*heads.to_qkv, up))
    modulation = None if is_given else modulation_of(found, norm, "norm")
    bare, to_out = found.bare_norm(norm, "norm", "norm"), found.layer(module, "proj_out")
    return _fitting(found, modulation, bare, heads, to_out, attn.heads, CLIP)


def _is_plain(found: Findings, attn: Any) -> bool:
    """Whether it is diffusers' FluxAttention with the processor whose arithmetic ours does."""
    layers = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
    fused, norms = ("to_qkv", "to_added_qkv"), ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
    children = (*layers, *fused, *norms, "to_out", "to_add_out")
    if not found.block(attn, "attn", ("FluxAttention",), children):
        return False
    found.watch(attn, "heads", "added_kv_proj_dim", "fused_projections")
    found.settings(attn, "attn", {"head_dim": attn.inner_dim // attn.heads})
    return plain_processor(found, attn, PROCESSOR, sys.modules[type(attn).__module__])


def plain_processor(found: Findings, attn: Any, name: str, home: ModuleType) -> bool:
    """Whether its processor is the one of that name in a Python module of diffusers', unchanged."""
    found.watch(attn, "processor")
    processor = processor_of(attn)
    kind = type(processor)
    if kind.__name__ != name or kind.__module__ != home.__name__:
        found.add(f"attn.processor is a {kind.__name__} of {kind.__module__}")
        return False
    for key in ("_attention_backend", "_parallel_config"):
        found.watched.append((vars(processor), key, vars(processor).get(key)))
        if getattr(processor, key, None) is not None:
            found.add(f"attn.processor.{key} is {getattr(processor, key)}")
    for owner, key in (*code_of(processor), (home, "dispatch_attention_fn")):
        found.function(owner, key, "attn.processor")
    return True


def _fitting(
    found: Findings,
    modulation: Layer | None,
    norm: nn.LayerNorm | None,
    heads: Heads | None,
    to_out: Layer | None,
    count: int,
    bounded: Bounded,
) -> Single | None:
    """A single block of these, if all widths are those of its tokens."""
    if norm is None or heads is None or to_out is None:
        return None
    width = to_out.out_features
    wanted = (3 * width, 2 * width + to_out.in_features, {width})
    made = sum(layer.out_features for layer in heads.to_qkv)
    rows = 3 * width if modulation is None else modulation.out_features
    sizes = (rows, made, {layer.in_features for layer in heads.to_qkv})
    if sizes != wanted or count < 1 or width % count:
        found.add(f"{count} heads of {width}, and layers of {sizes} in the place of {wanted}")
        return None
    return Single(modulation, norm, heads, to_out, count, bounded)


# ComfyUI's and Forge's, whose classes have the same names and children.


def matrices_of(pe: Any, x: torch.Tensor, tokens: int) -> tuple[Any, ...]:
    """Matrices (N or 1, tokens, D / 2, 2, 2) of what these give a block, or nothing."""
    if pe is None:
        return ()
    if type(pe) is not torch.Tensor or pe.ndim != 6 or pe.shape[1:3] != (1, tokens):
        raise UnknownModuleError((f"its rotary embedding is not (N, 1, {tokens}, D / 2, 2, 2)",))
    _check(pe, x)
    return (pe[:, 0],)


def comfys_double_call(
    module: Any,
    img: Any,
    txt: Any,
    vec: Any = None,
    pe: Any = None,
    attn_mask: Any = None,
    modulation_dims_img: Any = None,
    modulation_dims_txt: Any = None,
    transformer_options: Any = None,
    mod: Any = None,
) -> TokensCall:
    """`mod`: as Forge's Chroma calls `vec`."""
    _refuse(attn_mask, modulation_dims_img or modulation_dims_txt)
    turned = matrices_of(pe, img, img.shape[1] + txt.shape[1])
    embedding, rows = _embedding(vec if mod is None else mod), not hasattr(module, "img_mod")
    answer = lambda text, image: (image, text)  # noqa: E731
    return tokens_call(img, txt, embedding, answer, *turned, rows=rows)


def comfys_single_call(
    module: Any,
    x: Any,
    vec: Any = None,
    pe: Any = None,
    attn_mask: Any = None,
    modulation_dims: Any = None,
    transformer_options: Any = None,
    mod: Any = None,
) -> TokensCall:
    _refuse(attn_mask, modulation_dims)
    turned = matrices_of(pe, x, x.shape[1])
    embedding, rows = _embedding(vec if mod is None else mod), not hasattr(module, "modulation")
    return tokens_call(x, None, embedding, lambda made: made, *turned, rows=rows)


def _embedding(vec: Any) -> torch.Tensor:
    """A time embedding; or the rows (N, rows, C) that Chroma's blocks are given in its place, of
    the picture or of picture and prompt: shift, scale and gate (N, 1, C) of each.
    """
    if isinstance(vec, torch.Tensor):
        return vec
    each = [vec] if hasattr(vec, "shift") else [part for stream in vec for part in stream]
    return torch.cat([row for part in each for row in (part.shift, part.scale, part.gate)], 1)


def _refuse(mask: Any, dims: Any) -> None:
    if mask is not None:
        raise UnknownModuleError(("its attention has a mask",))
    if dims:
        raise UnknownModuleError(("parts of its tokens have a modulation of their own",))


def comfys_double(found: Findings, module: Any) -> Joint | None:
    """The parts of a DoubleStreamBlock; what is not as expected goes to `found`. Chroma's has no
    modulation of its own.
    """
    names = ("mod", "attn", "norm1", "norm2", "mlp")
    children = [f"{stream}_{name}" for stream in ("img", "txt") for name in names]
    if not found.block(module, "block", ("DoubleStreamBlock",), children, root=True):
        return None
    found.watch(module, "num_heads")
    picture, prompt = (_comfys_stream(found, module, stream) for stream in ("img", "txt"))
    if picture is None or prompt is None:
        return None
    flipped = bool(getattr(module, "flipped_img_txt", False))
    bounded = _bounded_by(module)
    return fitting(found, Joint(picture, prompt, None, module.num_heads, not flipped, bounded))


def comfys_single(found: Findings, module: Any) -> Single | None:
    """The parts of a SingleStreamBlock, likewise."""
    children = ("linear1", "linear2", "norm", "pre_norm", "mlp_act", "modulation")
    if not found.block(module, "block", ("SingleStreamBlock",), children, root=True):
        return None
    found.watch(module, "num_heads", "hidden_size", "mlp_hidden_dim")
    found.gelu(module, "mlp_act")
    linear1, linear2 = found.layer(module, "linear1"), found.layer(module, "linear2")
    norms = _comfys_norms(found, module, "norm")
    heads = None if linear1 is None or norms is None else Heads(module, (linear1,), None, *norms)
    modulation = _modulation(found, module, "modulation")
    pre_norm = found.bare_norm(module, "pre_norm")
    layers = (modulation, pre_norm, heads, linear2)
    return _fitting(found, *layers, module.num_heads, _bounded_by(module))


def _bounded_by(module: Any) -> Bounded:
    return _FORGES if type(module).__module__.partition(".")[0] == "backend" else _COMFYS


def _comfys_stream(found: Findings, block: Any, name: str) -> Stream | None:
    modulation = _modulation(found, block, f"{name}_mod")
    norm1, norm2 = (found.bare_norm(block, f"{name}_{norm}") for norm in ("norm1", "norm2"))
    attn: Any = getattr(block, f"{name}_attn")
    within, mlp = f"{name}_attn", f"{name}_mlp"
    if not found.block(attn, within, ("SelfAttention",), ("qkv", "norm", "proj")):
        return None
    found.settings(attn, within, {"num_heads": block.num_heads})
    qkv, proj = found.layer(attn, "qkv", within), found.layer(attn, "proj", within)
    norms = _comfys_norms(found, attn, "norm", within)
    up = down = None
    if found.listed(block, mlp, "", 3):
        found.gelu(block, f"{mlp}.1")
        up, down = found.layer(block, f"{mlp}.0"), found.layer(block, f"{mlp}.2")
    if norm1 is None or norm2 is None or qkv is None or proj is None:
        return None
    if norms is None or up is None or down is None:
        return None
    heads = Heads(attn, (qkv,), proj, *norms)
    return Stream(modulation, ATTENTION + FEED_FORWARD, norm1, heads, norm2, FeedForward(up, down))


def _modulation(found: Findings, block: Any, name: str) -> Layer | None:
    module = getattr(block, name, None)
    if module is None or not found.block(module, name, ("Modulation",), ("lin",)):
        return None
    return found.layer(module, "lin", name)


def _comfys_norms(found: Findings, owner: Any, key: str, within: str = "") -> Any:
    name = f"{within}.{key}" if within else key
    if not found.block(getattr(owner, key), name, ("QKNorm",), ("query_norm", "key_norm")):
        return None
    return norms_of(found, getattr(owner, key), name, ("query_norm", "key_norm"))
