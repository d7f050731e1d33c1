"""Names by which others' modules are known: classes of layers, and what hosts note on them."""

from __future__ import annotations

from torch import nn

CONV_CLASSES = {
    "torch.nn.modules.conv.Conv2d",
    "diffusers.models.lora.LoRACompatibleConv",
    "comfy.ops.disable_weight_init.Conv2d",
    "ldm_patched.modules.ops.disable_weight_init.Conv2d",
    "backend.operations.ForgeOperations.Conv2d",
}
FORGES_LINEAR = "backend.operations.ForgeOperations.Linear"
"""Not torch's, but with the same parameters and sizes."""
LINEAR_CLASSES = {
    "torch.nn.modules.linear.Linear",
    "diffusers.models.lora.LoRACompatibleLinear",
    "comfy.ops.disable_weight_init.Linear",
    "ldm_patched.modules.ops.disable_weight_init.Linear",
    FORGES_LINEAR,
}
LAYER_NORM_CLASSES = {
    "torch.nn.modules.normalization.LayerNorm",
    "comfy.ops.disable_weight_init.LayerNorm",
    "ldm_patched.modules.ops.disable_weight_init.LayerNorm",
    "backend.operations.ForgeOperations.LayerNorm",
}
GROUP_NORM_CLASSES = {
    "torch.nn.modules.normalization.GroupNorm",
    "comfy.ops.disable_weight_init.GroupNorm",
    "ldm_patched.modules.ops.disable_weight_init.GroupNorm",
    "backend.operations.ForgeOperations.GroupNorm",
}
FORGES_CAST = "parameters_manual_cast"
CASTS = ("comfy_cast_weights", "ldm_patched_cast_weights", FORGES_CAST)
"""What ComfyUI, reForge and Forge call a layer's flag that says so."""
CHANGES = ("forge_online_loras", "scale_weight")
"""What a layer of Forge's has where its weights are not what is computed with."""
WEIGHT_FUNCTIONS = ("weight_function", "bias_function")
"""Lists of what ComfyUI's, reForge's and a newer Forge Neo's layers do with their weights in each
call.
"""
QUANTISED = ("gguf_cls", "quant_state", "bnb_quantized")
"""What a packed weight has."""
GROUP_NORM_32 = ("GroupNorm32", "modules.diffusionmodules.util")
"""ldm's and sgm's GroupNorm, which computes in float32: its name, and how its module ends."""
OF_LAYERS = ("networks", "modules.devices")
"""Python modules of A1111's that replace forwards of torch's layers: by one networks are applied to
weights first, by the other weights of another dtype are cast.
"""
OURS = "lib_rocm_sd"
CONV_SETTINGS = ("stride", "padding", "dilation", "groups", "padding_mode")
"""What a convolution computes follows from, beside its weights."""


def path_of(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def is_group_norm(module: nn.Module) -> bool:
    cls, (name, home) = type(module), GROUP_NORM_32
    of_ldm = cls.__name__ == name and cls.__module__.endswith(home)
    return of_ldm or path_of(module) in GROUP_NORM_CLASSES
