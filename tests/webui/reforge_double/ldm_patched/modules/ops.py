"""Double of ldm_patched/modules/ops.py: the layers that models are made of.

The surface was read in Panchovix/stable-diffusion-webui-reForge 3b56b268. A layer whose weights are
not what is computed with makes these in each call.
"""

import torch
from torch.nn import functional


class CastWeightBiasOp:
    ldm_patched_cast_weights = False
    weight_function = []  # noqa: RUF012 - as there
    bias_function = []  # noqa: RUF012 - as there


def cast_bias_weight(s, input=None, dtype=None, device=None, bias_dtype=None):
    made = []
    for value, functions in ((s.weight, s.weight_function), (s.bias, s.bias_function)):
        cast = None if value is None else value.to(input)
        for function in functions:
            cast = function(cast)
        made.append(cast)
    return made


class _Layer(CastWeightBiasOp):
    def reset_parameters(self):
        return None

    def forward(self, *args, **kwargs):
        if self.ldm_patched_cast_weights or self.weight_function or self.bias_function:
            return self.forward_ldm_patched_cast_weights(*args, **kwargs)
        return super().forward(*args, **kwargs)


class disable_weight_init:  # noqa: N801 - as there
    class Linear(_Layer, torch.nn.Linear):
        def forward_ldm_patched_cast_weights(self, input):
            return functional.linear(input, *cast_bias_weight(self, input))

    class Conv2d(_Layer, torch.nn.Conv2d):
        def forward_ldm_patched_cast_weights(self, input):
            return self._conv_forward(input, *cast_bias_weight(self, input))

    class GroupNorm(_Layer, torch.nn.GroupNorm):
        def forward_ldm_patched_cast_weights(self, input):
            made = cast_bias_weight(self, input)
            return functional.group_norm(input, self.num_groups, *made, self.eps)

    class LayerNorm(_Layer, torch.nn.LayerNorm):
        def forward_ldm_patched_cast_weights(self, input):
            made = cast_bias_weight(self, input)
            return functional.layer_norm(input, self.normalized_shape, *made, self.eps)


class manual_cast(disable_weight_init):  # noqa: N801 - as there
    class Linear(disable_weight_init.Linear):
        ldm_patched_cast_weights = True

    class Conv2d(disable_weight_init.Conv2d):
        ldm_patched_cast_weights = True

    class GroupNorm(disable_weight_init.GroupNorm):
        ldm_patched_cast_weights = True

    class LayerNorm(disable_weight_init.LayerNorm):
        ldm_patched_cast_weights = True
