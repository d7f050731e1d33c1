"""PEFT's layers around a UNet's own: LoRA and DoRA, read as the layers that they stand for.

Read in PEFT 0.21.2, tuners/lora/layer.py: the forwards of Linear and Conv2d, which call
`base_layer` alone where adapters are disabled or merged into it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from lib_rocm_sd.hosts.read.findings import AROUND, Findings
from lib_rocm_sd.unet.merged import Adapter, MergedConv2d, MergedLinear

_DORA = {"DoraLinearVariant": "DoraLinearLayer", "DoraConv2dVariant": "DoraConv2dLayer"}
"""The variants whose formula is known, each with the class of what has their magnitudes."""
_PLAIN = {"fan_in_fan_out": False, "cast_input_dtype_enabled": True, "quantization_backend": None}
_STATE = ("_active_adapter", "_disable_adapters", "merged_adapters", "lora_variant", "use_dora")


def stood_for(found: Findings, module: Any, name: str, base: Any) -> Any:
    """What a call of the layer computes, as a layer with one weight: `base`, which was read, where
    no adapter counts. None, noted, where it is more than that.
    """
    _as_its_class(found, module, name)
    found.settings(module, name, _PLAIN)
    own = vars(module)
    for key in _STATE:  # as they are now: PEFT writes into them
        value = own.get(key)
        copied = type(value)(value) if isinstance(value, (dict, list)) else value
        found.watched.append((own, key, copied))
    disabled, merged = own.get("_disable_adapters", False), own.get("merged_adapters", [])
    if disabled and merged:
        found.add(f"{name} has merged adapters that are disabled: its next call takes them out")
        return None
    active = module.active_adapters
    names = [] if disabled or merged else [each for each in active if each in module.lora_A]
    adapters = [_adapter(found, module, f"{name}.{each}", each, base) for each in names]
    if None in adapters:
        return None
    if not adapters:
        return base
    stands: Any = MergedConv2d if isinstance(base, nn.Conv2d) else MergedLinear
    return stands(base, adapters)


def _as_its_class(found: Findings, module: Any, name: str) -> None:
    found.untouched(module, name)
    found.class_forward(type(module), name)


def _adapter(found: Findings, module: Any, name: str, key: str, base: Any) -> Adapter | None:
    """One that is active; None, noted, where it is more than two layers and a scale."""
    layers: Iterable[Any] = (module.lora_A[key], module.lora_B[key])
    if isinstance(base, nn.Conv2d):
        shape: Any = (base.kernel_size[0], base.stride[0], base.padding[0])
        options = zip(layers, (shape, (1, 1, 0)), strict=True)
        read: list[Any] = [
            found.conv(each, "", f"{name}.lora", *option) for each, option in options
        ]
    else:
        read = [found.linear(each, "", f"{name}.lora") for each in layers]
    found.no_dropout(module.lora_dropout, key, f"{name}.lora_dropout")
    scale, (down, up) = module.scaling.get(key), read
    if not isinstance(scale, (int, float)):
        found.add(f"{name} has a scale that is a {type(scale).__name__}")
        return None
    if down is None or up is None:
        return None
    if up.bias is not None or down.bias is not None:
        found.add(f"{name} has a bias")
        return None
    rank, rows = len(down.weight), base.weight.shape
    if down.weight.shape[1:] != rows[1:] or up.weight.shape[:2] != (rows[0], rank):
        found.add(f"{name} has {tuple(up.weight.shape)} times {tuple(down.weight.shape)}")
        return None
    variant = getattr(module, "lora_variant", {}).get(key)
    kind = type(variant).__name__ if variant is not None else ""
    if not kind and not getattr(module, "use_dora", {}).get(key):
        return Adapter(key, down, up, vars(module))
    if kind not in _DORA:
        found.add(f"{name} is a variant of LoRA ({kind or 'DoRA of an older PEFT'})")
        return None
    magnitude = module.lora_magnitude_vector[key]
    if type(magnitude).__name__ != _DORA[kind]:
        found.add(f"{name} has its magnitude in a {type(magnitude).__name__}")
    _as_its_class(found, magnitude, f"{name}.magnitude")
    return Adapter(key, down, up, vars(module), magnitude)


AROUND.update(
    {
        ("peft.tuners.lora.layer.Linear", nn.Linear): stood_for,
        ("peft.tuners.lora.layer.Conv2d", nn.Conv2d): stood_for,
    }
)
