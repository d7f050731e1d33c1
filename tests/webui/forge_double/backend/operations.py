"""Double of backend/operations.py: the layers that models are made of.

The surface was read in lllyasviel/stable-diffusion-webui-forge dfdcbab6. A layer whose weights are
not what is computed with makes these in each call.
"""

import contextlib

import torch
from torch.nn import functional

from backend.patcher.lora import merge_lora_to_weight

current_device = None
current_dtype = None
current_manual_cast_enabled = False


def get_weight_and_bias(layer, weight_args=None, bias_args=None, weight_fn=None, bias_fn=None):
    loras, made = getattr(layer, "forge_online_loras", None) or {}, []
    for key, args in (("weight", weight_args), ("bias", bias_args)):
        value = getattr(layer, key)
        if value is not None and args is not None:
            value = value.to(**args)
        if value is not None and key in loras:
            value = merge_lora_to_weight(loras[key], value, key, value.dtype)
        made.append(value)
    return made


def _of(layer, x):
    cast = {"device": x.device, "dtype": x.dtype} if layer.parameters_manual_cast else None
    return get_weight_and_bias(layer, cast, cast)


class _Layer:
    def __init__(self, *args, **kwargs):
        super().__init__(*args, device=current_device, dtype=current_dtype, **kwargs)
        self.parameters_manual_cast = current_manual_cast_enabled

    def reset_parameters(self):
        return None


class ForgeOperations:
    class Linear(torch.nn.Module):
        """Its parameters come with the weights that are loaded."""

        def __init__(self, in_features, out_features, *args, **kwargs):
            super().__init__()
            self.in_features, self.out_features = in_features, out_features
            self.dummy = torch.nn.Parameter(
                torch.empty(1, device=current_device, dtype=current_dtype)
            )
            self.weight = self.scale_weight = self.bias = None
            self.parameters_manual_cast = current_manual_cast_enabled

        def _load_from_state_dict(self, state_dict, prefix, *more):
            for key in ("weight", "bias"):
                if prefix + key in state_dict:
                    setattr(self, key, torch.nn.Parameter(state_dict[prefix + key].to(self.dummy)))
            del self.dummy

        def forward(self, x):
            return functional.linear(x, *_of(self, x))

    class Conv2d(_Layer, torch.nn.Conv2d):
        def forward(self, x):
            return self._conv_forward(x, *_of(self, x))

    class GroupNorm(_Layer, torch.nn.GroupNorm):
        def forward(self, x):
            return functional.group_norm(x, self.num_groups, *_of(self, x), self.eps)

    class LayerNorm(_Layer, torch.nn.LayerNorm):
        def forward(self, x):
            return functional.layer_norm(x, self.normalized_shape, *_of(self, x), self.eps)


class ForgeOperationsGGUF(ForgeOperations):
    class Linear(torch.nn.Module):
        """Weights of 8 bits, a scale for each row: the real ones have blocks of rows."""

        def __init__(self, in_features, out_features, *args, **kwargs):
            super().__init__()
            self.dummy = torch.nn.Parameter(torch.empty(1, dtype=current_dtype))
            self.weight = self.bias = None
            self.parameters_manual_cast = current_manual_cast_enabled

        def _load_from_state_dict(self, state_dict, prefix, *more):
            full = state_dict[prefix + "weight"].float()
            scale = full.abs().amax(1, keepdim=True) / 127
            packed = torch.nn.Parameter((full / scale).round().to(torch.int8), requires_grad=False)
            packed.gguf_cls, packed._scale = "Q8_0", scale
            self.weight = packed
            if prefix + "bias" in state_dict:
                self.bias = torch.nn.Parameter(state_dict[prefix + "bias"].to(self.dummy))
            del self.dummy

        def forward(self, x):
            weight = (self.weight.float() * self.weight._scale).to(x.dtype)
            return functional.linear(x, weight, self.bias)


@contextlib.contextmanager
def using_forge_operations(
    operations=None, device=None, dtype=None, manual_cast_enabled=False, bnb_dtype=None
):
    global current_device, current_dtype, current_manual_cast_enabled  # noqa: PLW0603 - as there
    current_device, current_dtype = device, dtype
    current_manual_cast_enabled = manual_cast_enabled
    kinds = operations or (ForgeOperationsGGUF if bnb_dtype == "gguf" else ForgeOperations)
    before = {
        name: getattr(torch.nn, name) for name in ("Linear", "Conv2d", "GroupNorm", "LayerNorm")
    }
    try:
        for name in before:
            setattr(torch.nn, name, getattr(kinds, name))
        yield
    finally:
        for name, kind in before.items():
            setattr(torch.nn, name, kind)
