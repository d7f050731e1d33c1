"""The blocks of ldm's and sgm's UNetModel, and of ComfyUI's and the Forges', which are ldm's with
options that come with each call: their parts, and what a call asks for.

Read in Comfy-Org/ComfyUI a125cd84 (0.3.64), comfy/ldm/modules: attention.py and
diffusionmodules/openaimodel.py; lllyasviel/stable-diffusion-webui-forge dfdcbab6,
backend/nn/unet.py; Panchovix/stable-diffusion-webui-reForge 3b56b268 and
Haoming02/sd-webui-forge-classic 1f95d717, ldm_patched/ldm/modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar

from torch import nn

from lib_rocm_sd.hosts.read.findings import Findings, beneath
from lib_rocm_sd.modules.stand_in import UnknownModuleError
from lib_rocm_sd.unet.parts import (
    Attention,
    Block,
    BlockCall,
    Ends,
    FeedForward,
    ImageCall,
    KeysValues,
    Resample,
    Resnet,
    Transformer,
    TransformerCall,
)

PREFERRED = "comfy_attention"
PREFERRED_CLASS = ("comfy.ldm.modules.attention", "ComfyAttention")
PATCHES = ("attn1_patch", "attn1_output_patch", "middle_patch", "attn2_patch", "attn2_output_patch")
"""Names in a model's `patches` that a transformer block calls within; the others come between."""
REPLACED = ("attn1", "attn2")
"""Names in a model's `patches_replace` that a transformer block looks for."""
NORM_WRAPPER = "group_norm_wrapper"
"""An option of a Forge's: what is called in the place of the norms in residual blocks."""
OVERRIDE = "optimized_attention_override"
"""An option: what Neo's attention functions call in their place, as ComfyUI's do."""
_PRECISION = "attn_precision"
"""An option, and an attribute of ComfyUI's blocks."""
_SHAPE = "activations_shape"
"""An option that ComfyUI's and reForge's transformers give their blocks."""
FIRST = ("norm_in", "ff_in")
"""What comes first in a transformer block of Stable Video Diffusion that attends over frames."""
OUTPUTS = ("zero_convs", "middle_block_out", "controlnet_down_blocks", "controlnet_mid_block")
"""Where ControlNets have the 1x1 convolutions that make their results."""
Options = Mapping[str, Any]
_Part = TypeVar("_Part")


def resnet_call(module: Any, x: Any, emb: Any) -> ImageCall | None:
    return ImageCall(x, emb)


def transformer_call(module: Any, x: Any, context: Any = None) -> TransformerCall | None:
    """One context, or a list with one for each block, or with one for all of them."""
    contexts = context if isinstance(context, list) else [context]
    if len(contexts) not in (1, len(module.transformer_blocks)):
        return None

    def given(index: int) -> dict[str, Any]:
        return {"context": contexts[index if len(contexts) > 1 else 0]}

    return TransformerCall(x, given, lambda y: y)


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


def resample_call(module: Any, x: Any) -> ImageCall | None:
    return ImageCall(x)


def end_call(module: Any, input: Any) -> ImageCall | None:  # noqa: A002 - what torch calls it
    return ImageCall(input)


class Ldm:
    """Reads the blocks of a UNet by kind. What is not as expected goes to `found`. A family of
    hosts whose classes differ derives from it.
    """

    classes: ClassVar[tuple[str, ...]] = (
        *("ResBlock", "SpatialTransformer", "BasicTransformerBlock"),
        *("Upsample", "Downsample"),
    )
    """Names of the classes of residual blocks, transformers, their blocks, and samplers."""
    ends: ClassVar[tuple[str, ...]] = ("input_blocks.0.0", "out", *OUTPUTS)
    """Where a UNet's first and last layers are."""
    transformer_settings: ClassVar[Options] = {}
    block_settings: ClassVar[Options] = {"disable_self_attn": False}
    block_children: ClassVar[tuple[str, ...]] = (
        *("norm1", "attn1", "norm2", "attn2", "norm3", "ff"),
    )
    sampler_settings: ClassVar[Options] = {"use_conv": True, "dims": 2}
    may_lack_cross: ClassVar[bool] = False
    """Whether a transformer block may have no attn2."""
    net_lengths: ClassVar[tuple[int, ...]] = (3,)
    """How many modules a feed-forward net may have."""
    up_convs: ClassVar[tuple[str, ...]] = ("conv",)
    down_convs: ClassVar[tuple[str, ...]] = ("op",)
    """Names of a sampler's convolution."""
    calls: ClassVar[Mapping[str, Callable[..., Any]]] = {
        "resnet": resnet_call,
        "transformer": transformer_call,
        "block": block_call,
        "resample": resample_call,
        "end": end_call,
    }
    """What a call asks for, by the name of what reads its block; see Kind.bind."""

    def begins(
        self,
        found: Findings,
        module: Any,
        name: str,
        number: int,
        children: Iterable[str],
        root: bool = True,
    ) -> bool:
        """Whether it is of the class that it has to be of, the `number`th of `classes`. `root`:
        see Findings.block.
        """
        return found.block(module, name, (self.classes[number],), children, root=root)

    def resnet(self, found: Findings, module: Any) -> Resnet | None:
        layers = ("in_layers", "emb_layers", "out_layers", "skip_connection")
        if not self.begins(found, module, "block", 0, (*layers, "h_upd", "x_upd")):
            return None
        expected = ("exchange_temb_dims", "skip_t_emb")
        found.settings(module, "block", dict.fromkeys(expected, False))
        modulates = bool(getattr(module, "use_scale_shift_norm", False))
        resize = ""
        if getattr(module, "updown", False):
            resize, other = (self.resizes(found, module, key) for key in ("h_upd", "x_upd"))
            if resize != other:
                found.add("h_upd and x_upd differ")
        lists = zip(layers, (3, 2, 4), strict=False)
        if not all([found.listed(module, name, "", count) for name, count in lists]):
            return None
        for name in ("in_layers.1", "emb_layers.0", "out_layers.1"):
            found.silu(module, name)
        found.no_dropout(module, "out_layers.2")
        norm1, conv1 = found.group_norm(module, "in_layers.0"), found.conv(module, "in_layers.2")
        embed = found.linear(module, "emb_layers.1")
        norm2, conv2 = found.group_norm(module, "out_layers.0"), found.conv(module, "out_layers.3")
        shortcut = None
        if type(getattr(module, "skip_connection", None)) is nn.Identity:
            found.untouched(module.skip_connection, "skip_connection")
        else:
            shortcut = found.conv(module, "skip_connection", kernel=1)
        if norm1 is None or conv1 is None or embed is None or norm2 is None or conv2 is None:
            return None
        return Resnet(norm1, conv1, embed, True, norm2, conv2, shortcut, modulates, resize)

    def resizes(self, found: Findings, module: Any, name: str) -> str:
        """What a residual block's sampler, which has no weights, does: see Resnet."""
        sampler = getattr(module, name)
        up = type(sampler).__name__ == self.classes[3]
        keys = self.up_convs if up else self.down_convs
        if not self.begins(found, sampler, name, 3 if up else 4, () if up else keys, root=False):
            return ""
        found.settings(sampler, name, {**self.sampler_settings, "use_conv": False})
        if not up:
            found.mean_of_four(sampler, keys[0], name)
        return "up" if up else "down"

    def transformer(self, found: Findings, module: Any) -> Transformer | None:
        children = ("norm", "proj_in", "transformer_blocks", "proj_out")
        if not self.begins(found, module, "transformer", 1, children):
            return None
        found.settings(module, "transformer", self.transformer_settings)
        norm = found.group_norm(module, "norm")
        proj_in = found.projection(module, "proj_in")
        proj_out = found.projection(module, "proj_out")
        blocks = found.listed(module, "transformer_blocks")
        if norm is None or proj_in is None or proj_out is None:
            return None
        return Transformer(norm, proj_in, tuple(blocks), proj_out)

    def block(self, found: Findings, module: Any) -> Block | None:
        if not self.begins(found, module, "block", 2, self.block_children):
            return None
        found.settings(module, "block", self.block_settings)
        own, cross, ff = (getattr(module, key, None) for key in ("attn1", "attn2", "ff"))
        crosses = cross is not None or not self.may_lack_cross
        norm1 = found.layer_norm(module, "norm1")
        norm2 = found.layer_norm(module, "norm2") if crosses else None
        norm3 = found.layer_norm(module, "norm3")
        needed = {"attn1": own, "ff": ff, **({"attn2": cross} if crosses else {})}
        missing = [key for key, part in needed.items() if part is None]
        for key in missing:
            found.add(f"{key} is missing")
        if norm1 is None or norm3 is None or (crosses and norm2 is None) or missing:
            return None
        return Block(
            *(norm1, norm2, norm3, module.attn1, cross, module.ff),
            _whole(found, "attn1", own, self.attention),
            _whole(found, "attn2", cross, self.attention) if crosses else None,
            _whole(found, "ff", ff, self.feed_forward),
            **self._first(found, module),
        )

    def _first(self, found: Findings, module: Any) -> dict[str, Any]:
        """What comes first in a block that attends over frames."""
        ff = getattr(module, "ff_in", None)
        if not isinstance(ff, nn.Module):
            return {}
        norm = found.layer_norm(module, "norm_in")
        return {"norm_in": norm, "ff_in": self.feed_forward(found, ff, "ff_in")}

    def attention(self, found: Findings, module: Any, name: str) -> Attention | None:
        if not self.is_plain_attention(found, module, name):
            return None
        found.watch(module, "heads")
        outs = found.listed(module, "to_out", name, 2)
        if outs:
            found.no_dropout(module, "to_out.1", name)
        read = [found.linear(module, key, name) for key in self.projections(module)]
        out = found.linear(module, "to_out.0", name) if outs else None
        layers = [layer for layer in read if layer is not None]
        if len(layers) < len(read) or out is None:
            return None
        width, heads = out.in_features, module.heads
        sizes, many = [layer.out_features for layer in layers], 4 - len(layers)
        fit = [width] * 3 if many == 1 else [width, 2 * width] if many == 2 else [3 * width]
        if sizes != fit or heads < 1 or width % heads:
            found.add(f"{heads} heads of {width} in all; queries, keys and values are {sizes} wide")
            return None
        if self.is_scaled(module):
            found.settings(module, name, {"scale": (width // heads) ** -0.5})
        return Attention(layers[0], KeysValues(tuple(layers[1:])), out, heads)

    def projections(self, module: Any) -> tuple[str, ...]:
        """Names of what makes queries, keys and values."""
        return "to_q", "to_k", "to_v"

    def is_plain_attention(self, found: Findings, module: Any, name: str) -> bool:
        """Whether it is of a known class, apart from its layers.

        ComfyUI's has a child without parameters that names the function which a checkpoint prefers.
        It does not matter which: ComfyUI asks a model's override before it, and ours computes
        attention only where the override is ours. Read in Comfy-Org/ComfyUI 05080f60 (0.38):
        comfy/ldm/modules/attention.py, ComfyAttention and wrap_attn.
        """
        cls = type(getattr(module, PREFERRED, None))
        preferred = [PREFERRED] if (cls.__module__, cls.__name__) == PREFERRED_CLASS else []
        classes = ("CrossAttention", "MemoryEfficientCrossAttention")
        return found.block(module, name, classes, ("to_q", "to_k", "to_v", "to_out", *preferred))

    def is_scaled(self, module: Any) -> bool:
        """Whether scores are scaled by what the module has as `scale`."""
        return True

    def feed_forward(self, found: Findings, module: Any, name: str) -> FeedForward | None:
        """A net of GEGLU, dropout and Linear; a second dropout may follow."""
        if not found.block(module, name, ("FeedForward",), ("net",)):
            return None
        net = found.listed(module, "net", name, *self.net_lengths)
        if not net or not found.block(net[0], f"{name}.net.0", ("GEGLU",), ("proj",)):
            return None
        proj = found.linear(module, "net.0.proj", name)
        for number in range(1, len(net)):
            if number != 2:
                found.no_dropout(module, f"net.{number}", name)
        out = found.linear(module, "net.2", name)
        if proj is None or out is None:
            return None
        if proj.out_features != 2 * out.in_features:
            found.add(f"{name} has {proj.out_features} gated features for {out.in_features}")
            return None
        return FeedForward(proj, out)

    def resample(self, found: Findings, module: Any) -> Resample | None:
        up = type(module).__name__ == self.classes[3]
        keys = self.up_convs if up else self.down_convs
        if not self.begins(found, module, "sampler", 3 if up else 4, keys):
            return None
        found.settings(module, "sampler", self.sampler_settings)
        there = (key for key in keys if getattr(module, key, None) is not None)
        conv = getattr(module, next(there, ""), None)
        read = found.conv(conv, "", keys[0], stride=1 if up else 2, padding=1)
        return None if read is None else Resample(read, up)

    def end(self, found: Findings, module: Any) -> Ends | None:
        """A convolution; or GroupNorm, SiLU and one; or GroupNorm, whose SiLU is another module."""
        if isinstance(module, nn.GroupNorm):
            norm = found.group_norm(module, "", "norm")
            return None if norm is None else Ends(norm, False, None)
        if isinstance(beneath(module), nn.Conv2d):
            kernel = 1 if beneath(module).kernel_size == (1, 1) else 3
            conv = found.conv(module, "", "conv", kernel)
            return None if conv is None else Ends(None, False, conv)
        if not found.listed(module, "", "out", 3):
            return None
        norm, conv = found.group_norm(module, "0", "out"), found.conv(module, "2", "out")
        found.silu(module, "1", "out")
        return None if norm is None or conv is None else Ends(norm, True, conv)


def _whole(
    found: Findings,
    name: str,
    module: Any,
    read: Callable[[Findings, Any, str], _Part | None],
) -> _Part | None:
    """What `read` gives if nothing was found against it; else None, the reasons noted as partial.

    The rest of the block is read all the same: the module is called as it is.
    """
    part = found.part()
    made = read(part, module, name)
    found.watched += part.watched
    found.functions += part.functions
    if made is None or part.reasons:
        found.partly += part.reasons
        return None
    return made


# --- ComfyUI


def patches_of(options: Options) -> list[str]:
    """What is called within every transformer block."""
    given = options.get("patches", {})
    return [name for name in PATCHES if name in given]


def _replacements(module: Any, options: Options) -> dict[str, Callable[..., Any]]:
    """What is called in the place of attn1 and attn2 of the transformer block that runs: that of
    its place, or of its layer. As the block calls it: between the products, with the options.
    """
    place, patches = options.get("block"), options.get("patches_replace", {})
    found: dict[str, Callable[..., Any]] = {}
    if place is None or not patches:
        return found
    more = _more(options, module)
    for name in REPLACED:
        known = patches.get(name, {})
        places = ((place[0], place[1], options.get("block_index", 0)), place)
        patch = next((known[one] for one in places if one in known), None)
        if patch is not None:
            found[name] = partial(_replaced, getattr(module, name), patch, more)
    return found


def _replaced(
    attention: Any, patch: Any, more: Options, x: Any, context: Any = None, **_: Any
) -> Any:
    """What a patch gives in the place of an attention, of x without a context."""
    context = x if context is None else context
    q, k, v = attention.to_q(x), attention.to_k(context), attention.to_v(context)
    return attention.to_out(patch(q, k, v, more))


def _more(options: Options, block: Any) -> dict[str, Any]:
    """The options as a block gives them to what is called within."""
    own = {"n_heads": block.n_heads, "dim_head": block.d_head}
    if hasattr(block, _PRECISION):
        own[_PRECISION] = block.attn_precision
    return {k: v for k, v in options.items() if k not in ("patches", "patches_replace")} | own


def comfys_transformer_call(
    module: Any, x: Any, context: Any = None, transformer_options: Any = None
) -> TransformerCall | None:
    return _with_options(module, x, context, transformer_options, shaped=True)


def _with_options(
    module: Any, x: Any, context: Any, transformer_options: Any, *, shaped: bool
) -> TransformerCall | None:
    """One context, or a list with one for each block. `shaped`: these are told the shape of x."""
    options = {} if transformer_options is None else transformer_options
    plain = transformer_call(module, x, context)
    count = len(module.transformer_blocks)
    if plain is None or (isinstance(context, list) and len(context) != count):
        return None
    if shaped:
        options[_SHAPE] = list(x.shape)

    def given(index: int) -> dict[str, Any]:
        options["block_index"] = index
        return {**plain.given(index), "transformer_options": dict(options)}  # of this block

    return TransformerCall(x, given, plain.answer)


def comfys_block_call(
    module: Any, x: Any, context: Any = None, transformer_options: Any = None
) -> BlockCall | None:
    """What is patched within is not for us, but for attention that is replaced."""
    options = {} if transformer_options is None else transformer_options
    if patches_of(options):
        return None
    more = {"value": None, "transformer_options": options}
    return _block_call(module, x, context, options, more, more)


def _block_call(
    module: Any, x: Any, context: Any, options: Options, own: Options, cross: Options
) -> BlockCall:
    """`own` and `cross`: what attn1 and attn2 are given beside a context where they are called."""
    given = {"context": None, **own}, {"context": context, **cross}
    one, other = map(_replacements(module, options).get, REPLACED)
    return BlockCall(x, context, *given, one is None, other is None, attn1=one, attn2=other)


def comfys_resample_call(module: Any, x: Any, output_shape: Any = None) -> ImageCall | None:
    """Upsampling to another size than twice the image's is not for us."""
    if output_shape is not None and list(output_shape[2:]) != [2 * size for size in x.shape[2:]]:
        return None
    return ImageCall(x)


class Comfy(Ldm):
    """ComfyUI's UNetModel."""

    block_settings: ClassVar[Options] = {
        **Ldm.block_settings,
        "switch_temporal_ca_to_sa": False,
        "is_res": True,
    }
    block_children: ClassVar[tuple[str, ...]] = (*Ldm.block_children, *FIRST)
    calls: ClassVar[Mapping[str, Callable[..., Any]]] = {
        **Ldm.calls,
        "transformer": comfys_transformer_call,
        "block": comfys_block_call,
        "resample": comfys_resample_call,
    }


# --- the Forges

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
"""What the forwards of each class name: attributes, functions, options. Forks compute other things
in classes of the same names, so a class is known by what its forward calls, too.
"""


def forges_resnet_call(
    module: Any, x: Any, emb: Any, transformer_options: Any = None
) -> ImageCall | None:
    if NORM_WRAPPER in (transformer_options or {}):
        raise UnknownModuleError((f"a {NORM_WRAPPER} is set in this model",))
    return ImageCall(x, emb)


def forges_transformer_call(
    module: Any, x: Any, context: Any = None, transformer_options: Any = None
) -> TransformerCall | None:
    shaped = _SHAPE in type(module).forward.__code__.co_consts
    return _with_options(module, x, context, transformer_options, shaped=shaped)


def forges_block_call(
    module: Any, x: Any, context: Any = None, transformer_options: Any = None
) -> BlockCall | None:
    """What is patched within is not for us: UnknownModuleError says what."""
    options = {} if transformer_options is None else transformer_options
    patches = patches_of(options)
    why = f"{', '.join(patches)} of this model" if patches else ""
    if OVERRIDE in options or why:
        raise UnknownModuleError((why or f"an {OVERRIDE} is set in this model",))
    own, cross = (_given(part, options, module) for part in (module.attn1, module.attn2))
    return _block_call(module, x, context, options, own, cross)


def _given(attention: Any, options: Options, block: Any) -> dict[str, Any]:
    """What an attention that is called as it is gets beside its context, as its block has it."""
    code = getattr(type(attention).forward, "__code__", None)
    if code is None or "transformer_options" not in code.co_varnames[: code.co_argcount]:
        return {"value": None}
    return {"value": None, "transformer_options": _more(options, block)}


class Forge(Comfy):
    """The UNetModel of Forge, reForge and Classic."""

    calls: ClassVar[Mapping[str, Callable[..., Any]]] = {
        **Comfy.calls,
        "resnet": forges_resnet_call,
        "transformer": forges_transformer_call,
        "block": forges_block_call,
    }

    def begins(
        self,
        found: Findings,
        module: Any,
        name: str,
        number: int,
        children: Iterable[str],
        root: bool = True,
    ) -> bool:
        self._look_at_code(found, module, "block" if name == "transformer" else name)
        return super().begins(found, module, name, number, children, root)

    def block(self, found: Findings, module: Any) -> Block | None:
        """A part that does more than is known is called as it is."""
        made = super().block(found, module)
        if made is None:
            return None
        own: dict[str, Any] = {}
        for name, key in (
            *(("attn1", "self_attention"), ("attn2", "cross_attention")),
            ("ff", "feed_forward"),
        ):
            looked = found.part()
            for each in getattr(made, name).modules():
                self._look_at_code(looked, each, name)
            if looked.reasons:
                found.partly += [why for why in looked.reasons if why not in found.partly]
                own[key] = None
        return replace(made, **own)

    def _look_at_code(self, found: Findings, module: Any, name: str) -> None:
        """Notes a class of a known name whose forwards do more than those that were read."""
        cls = next((cls for cls in type(module).__mro__ if cls.__name__ in _KNOWN), None)
        if cls is not None:
            found.code(cls, name, _KNOWN[cls.__name__])
