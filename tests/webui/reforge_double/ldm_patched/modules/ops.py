"""Double of ldm_patched/modules/ops.py: the layers that a VAE is made of.

The surface was read in Panchovix/stable-diffusion-webui-reForge 3b56b268.
"""

import torch


class CastWeightBiasOp:
    ldm_patched_cast_weights = False
    weight_function = []  # noqa: RUF012 - as there
    bias_function = []  # noqa: RUF012 - as there


class disable_weight_init:  # noqa: N801 - as there
    class Linear(torch.nn.Linear, CastWeightBiasOp):
        def reset_parameters(self):
            return None

        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class Conv2d(torch.nn.Conv2d, CastWeightBiasOp):
        def reset_parameters(self):
            return None

        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class GroupNorm(torch.nn.GroupNorm, CastWeightBiasOp):
        def reset_parameters(self):
            return None

        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)
