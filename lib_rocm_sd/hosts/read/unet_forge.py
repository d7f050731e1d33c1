"""The blocks of the Forges' UNets: ldm's, with options that come with each call.

Read in lllyasviel/stable-diffusion-webui-forge dfdcbab6, backend/nn/unet.py, and in
Panchovix/stable-diffusion-webui-reForge 3b56b268 and Haoming02/sd-webui-forge-classic 1f95d717,
ldm_patched/ldm/modules: attention.py and diffusionmodules/openaimodel.py. Forks of them compute
other things in classes of the same names. So a class is known by what its forward calls, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lib_rocm_sd.hosts.read import unet_comfy, unet_ldm
from lib_rocm_sd.hosts.read.findings import Findings
from lib_rocm_sd.modules.unknown import UnknownModuleError
from lib_rocm_sd.unet.parts import (
    Block,
    BlockCall,
    Ends,
    ImageCall,
    Resample,
    Resnet,
    Transformer,
    TransformerCall,
)

end_call = unet_ldm.end_call
resample_call = unet_comfy.resample_call

NORM_WRAPPER = "group_norm_wrapper"
"""An option: what is called in the place of the norms in residual blocks."""
OVERRIDE = "optimized_attention_override"
"""An option: what Neo's attention functions call in their place, as ComfyUI's do."""
_SHAPE = "activations_shape"
"""An option that reForge's transformers give their blocks."""
_CHECKPOINT = "_forward checkpoint parameters use_checkpoint"
_PROJECTIONS = "to_q to_k to_v to_out"
_KNOWN: Mapping[str, frozenset[str]] = {
    name: frozenset(words.split())
    for name, words in {
        "ResBlock": f"{_CHECKPOINT} updown in_layers h_upd x_upd skip_t_emb emb_layers type dtype "
        "len shape use_scale_shift_norm out_layers torch th chunk exchange_temb_dims rearrange "
        f"movedim skip_connection {NORM_WRAPPER}",
        "SpatialTransformer": "isinstance list len transformer_blocks shape norm use_linear "
        f"proj_in proj_out rearrange contiguous movedim flatten reshape enumerate {_SHAPE} "
        "block_index",
        "BasicTransformerBlock": f"{_CHECKPOINT} {_PROJECTIONS} get block block_index patches "
        "patches_replace n_heads d_head dim_head attn_precision ff_in norm_in is_res norm1 norm2 "
        "norm3 disable_self_attn switch_temporal_ca_to_sa attn1 attn2 ff middle_patch attn1_patch "
        "attn1_output_patch attn2_patch attn2_output_patch",
        "CrossAttention": f"{_PROJECTIONS} default heads attention_function optimized_attention "
        "optimized_attention_masked attn_precision",
        "FeedForward": "net",
        "GEGLU": "proj chunk torch nn functional F gelu",
        "Upsample": "shape channels dims torch nn functional F interpolate nearest use_conv conv",
        "Downsample": "shape channels op",
    }.items()
}
"""What the forwards of each class name: attributes, functions, options."""


def resnet(found: Findings, module: Any) -> Resnet | None:
    _known(found, module, "block")
    return unet_ldm.resnet(found, module)


def resnet_call(module: Any, x: Any, emb: Any, transformer_options: Any = None) -> ImageCall | None:
    if NORM_WRAPPER in (transformer_options or {}):
        raise UnknownModuleError((f"a {NORM_WRAPPER} is set in this model",))
    return ImageCall(x, emb)


def transformer(found: Findings, module: Any) -> Transformer | None:
    _known(found, module, "block")
    return unet_ldm.transformer(found, module)


def transformer_call(
    module: Any, x: Any, context: Any = None, transformer_options: Any = None
) -> TransformerCall | None:
    shaped = _SHAPE in type(module).forward.__code__.co_consts
    return unet_comfy.transformer_called(module, x, context, transformer_options, shaped=shaped)


def block(found: Findings, module: Any) -> Block | None:
    """What its parts do beyond what is known is theirs; so these are then called as they are."""
    _known(found, module, "block")
    made = unet_comfy.block(found, module)
    if made is None:
        return None
    parts = {"self_attention": made.attn1, "cross_attention": made.attn2, "feed_forward": made.ff}
    known = {key: getattr(made, key) for key in parts}
    for key, part in parts.items():
        looked = found.part()
        for each in _within(part):
            _known(looked, each, _name_of(module, part))
        if looked.reasons:
            found.partly += [why for why in looked.reasons if why not in found.partly]
            known[key] = None
    return Block(made.norm1, made.norm2, made.norm3, made.attn1, made.attn2, made.ff, **known)


def block_call(
    module: Any, x: Any, context: Any = None, transformer_options: Any = None
) -> BlockCall | None:
    """What is patched within is not for us: UnknownModuleError says what."""
    options = {} if transformer_options is None else transformer_options
    why = f"an {OVERRIDE} is set in this model" if OVERRIDE in options else ""
    why = why or unet_comfy.patched(options)
    if why:
        raise UnknownModuleError((why,))
    own, cross = (_given(part, options, module) for part in (module.attn1, module.attn2))
    return BlockCall(x, context, {"context": None, **own}, {"context": context, **cross})


def _given(attention: Any, options: Mapping[str, Any], block: Any) -> dict[str, Any]:
    """What an attention that is called as it is gets beside its context, as its block has it."""
    given: dict[str, Any] = {"value": None}
    code = getattr(type(attention).forward, "__code__", None)
    if code is not None and "transformer_options" in code.co_varnames[: code.co_argcount]:
        more = {k: v for k, v in options.items() if k not in ("patches", "patches_replace")}
        more |= {"n_heads": block.n_heads, "dim_head": block.d_head}
        given["transformer_options"] = more
    return given


def resample(found: Findings, module: Any) -> Resample | None:
    _known(found, module, "sampler")
    return unet_ldm.resample(found, module)


def end(found: Findings, module: Any) -> Ends | None:
    return unet_ldm.end(found, module)


def _known(found: Findings, module: Any, name: str) -> None:
    """Notes a class of a known name whose forwards do more than those that were read."""
    cls = next((cls for cls in type(module).__mro__ if cls.__name__ in _KNOWN), None)
    if cls is not None:
        found.code(cls, name, _KNOWN[cls.__name__])


def _within(part: nn.Module | None) -> list[nn.Module]:
    modules = () if part is None else part.modules()
    return [each for each in modules if type(each).__name__ in _KNOWN]


def _name_of(module: nn.Module, part: nn.Module | None) -> str:
    return next(key for key, child in module._modules.items() if child is part)
