"""The blocks of ComfyUI's UNetModel: ldm's, with options that come with each call.

Read in Comfy-Org/ComfyUI a125cd84 (0.3.64): comfy/ldm/modules/attention.py,
comfy/ldm/modules/diffusionmodules/openaimodel.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lib_rocm_sd.hosts.read import unet_ldm
from lib_rocm_sd.hosts.read.findings import Findings
from lib_rocm_sd.unet.parts import Block, BlockCall, ImageCall, TransformerCall

resnet, resnet_call = unet_ldm.resnet, unet_ldm.resnet_call
transformer, resample = unet_ldm.transformer, unet_ldm.resample
end, end_call = unet_ldm.end, unet_ldm.end_call

Options = Mapping[str, Any]
PATCHES = ("attn1_patch", "attn1_output_patch", "middle_patch", "attn2_patch", "attn2_output_patch")
"""Names in a model's `patches` that a transformer block calls within; the others come between."""
REPLACED = ("attn1", "attn2")
"""Names in a model's `patches_replace` that a transformer block looks for."""


def patches_of(options: Options) -> list[str]:
    """What is called within every transformer block."""
    given = options.get("patches", {})
    return [name for name in PATCHES if name in given]


def transformer_call(
    module: Any, x: Any, context: Any = None, transformer_options: Any = None
) -> TransformerCall | None:
    """One context, or a list with one for each block."""
    return transformer_called(module, x, context, transformer_options, shaped=True)


def transformer_called(
    module: Any, x: Any, context: Any, transformer_options: Any, *, shaped: bool
) -> TransformerCall | None:
    """The same. `shaped`: blocks are told the shape of x."""
    options = {} if transformer_options is None else transformer_options
    found = unet_ldm.transformer_call(module, x, context)
    count = len(module.transformer_blocks)
    if found is None or (isinstance(context, list) and len(context) != count):
        return None
    if shaped:
        options["activations_shape"] = list(x.shape)

    def given(index: int) -> dict[str, Any]:
        options["block_index"] = index
        return {**found.given(index), "transformer_options": dict(options)}  # of this block

    return TransformerCall(x, given, found.answer)


def block(found: Findings, module: Any) -> Block | None:
    made = unet_ldm.block(found, module)
    found.settings(module, "block", {"switch_temporal_ca_to_sa": False, "is_res": True})
    return made


def block_call(
    module: Any, x: Any, context: Any = None, transformer_options: Any = None
) -> BlockCall | None:
    """What is patched within is not for us."""
    options = {} if transformer_options is None else transformer_options
    if patched(options):
        return None
    more = {"value": None, "transformer_options": options}
    return BlockCall(x, context, {"context": None, **more}, {"context": context, **more})


def patched(options: Options) -> str:
    """What is called within the transformer block that runs: by all, its place or its layer's."""
    patches = patches_of(options)
    if patches:
        return f"{', '.join(patches)} of this model"
    place = options.get("block")
    if place is None:
        return ""
    places = ((place[0], place[1], options.get("block_index", 0)), place)
    replaced = options.get("patches_replace", {})
    found = [name for name in REPLACED if any(one in replaced.get(name, {}) for one in places)]
    return f"{', '.join(found)} is replaced in this layer" if found else ""


def resample_call(module: Any, x: Any, output_shape: Any = None) -> ImageCall | None:
    """Upsampling to another size than twice the image's is not for us."""
    if output_shape is not None:
        twice = [2 * size for size in x.shape[2:]]
        if list(output_shape[2:]) != twice:
            return None
    return ImageCall(x)
