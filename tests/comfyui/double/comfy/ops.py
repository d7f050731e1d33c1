"""Double of comfy/ops.py (Comfy-Org/ComfyUI a125cd84): layers that may make their weights anew."""

import torch.nn.functional as F
from torch import nn


def cast_bias_weight(s, input=None, dtype=None, device=None, bias_dtype=None):
    made = []
    for name in ("weight", "bias"):
        tensor = getattr(s, name)
        if tensor is not None:
            tensor = tensor.to(input)
            for change in getattr(s, f"{name}_function"):
                tensor = change(tensor)
        made.append(tensor)
    return tuple(made)


class CastWeightBiasOp:
    comfy_cast_weights = False
    weight_function = []  # noqa: RUF012
    bias_function = []  # noqa: RUF012

    def _plain(self):
        return not (self.comfy_cast_weights or self.weight_function or self.bias_function)


class disable_weight_init:  # noqa: N801
    class Linear(nn.Linear, CastWeightBiasOp):
        def forward(self, *args, **kwargs):
            if self._plain():
                return super().forward(*args, **kwargs)
            return self.forward_comfy_cast_weights(*args, **kwargs)

        def forward_comfy_cast_weights(self, input):
            return F.linear(input, *cast_bias_weight(self, input))

    class Conv2d(nn.Conv2d, CastWeightBiasOp):
        def forward(self, *args, **kwargs):
            if self._plain():
                return super().forward(*args, **kwargs)
            return self.forward_comfy_cast_weights(*args, **kwargs)

        def forward_comfy_cast_weights(self, input):
            return self._conv_forward(input, *cast_bias_weight(self, input))

    class Conv3d(nn.Conv3d, CastWeightBiasOp):
        pass

    class GroupNorm(nn.GroupNorm, CastWeightBiasOp):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class LayerNorm(nn.LayerNorm, CastWeightBiasOp):
        def forward(self, *args, **kwargs):
            if self._plain() or self.weight is None:
                return super().forward(*args, **kwargs)
            return self.forward_comfy_cast_weights(*args, **kwargs)

        def forward_comfy_cast_weights(self, input):
            weight, bias = cast_bias_weight(self, input)
            return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)

    class RMSNorm(nn.RMSNorm, CastWeightBiasOp):
        bias = None

        def forward(self, *args, **kwargs):
            if self._plain():
                return super().forward(*args, **kwargs)
            return self.forward_comfy_cast_weights(*args, **kwargs)

        def forward_comfy_cast_weights(self, input):
            weight, _ = cast_bias_weight(self, input)
            return F.rms_norm(input, self.normalized_shape, weight, self.eps)

    @classmethod
    def conv_nd(s, dims, *args, **kwargs):  # noqa: N804
        return (s.Conv2d if dims == 2 else s.Conv3d)(*args, **kwargs)


class manual_cast(disable_weight_init):  # noqa: N801
    class Linear(disable_weight_init.Linear):
        comfy_cast_weights = True

    class Conv2d(disable_weight_init.Conv2d):
        comfy_cast_weights = True

    class GroupNorm(disable_weight_init.GroupNorm):
        comfy_cast_weights = True

    class LayerNorm(disable_weight_init.LayerNorm):
        comfy_cast_weights = True

    class RMSNorm(disable_weight_init.RMSNorm):
        comfy_cast_weights = True
