"""Double of comfy/ops.py (Comfy-Org/ComfyUI a125cd84): layers as a VAE has them."""

from torch import nn


class CastWeightBiasOp:
    comfy_cast_weights = False
    weight_function = []  # noqa: RUF012
    bias_function = []  # noqa: RUF012


class disable_weight_init:  # noqa: N801
    class Linear(nn.Linear, CastWeightBiasOp):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class Conv2d(nn.Conv2d, CastWeightBiasOp):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class GroupNorm(nn.GroupNorm, CastWeightBiasOp):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)
