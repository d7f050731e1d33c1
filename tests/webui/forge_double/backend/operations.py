"""Double of backend/operations.py: the layers that a VAE is made of.

The surface was read in lllyasviel/stable-diffusion-webui-forge dfdcbab6.
"""

import contextlib

import torch


class ForgeOperations:
    class Conv2d(torch.nn.Conv2d):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.parameters_manual_cast = False

        def reset_parameters(self):
            return None

        def forward(self, x):
            return self._conv_forward(x, self.weight.to(x), self.bias.to(x))

    class GroupNorm(torch.nn.GroupNorm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.parameters_manual_cast = False

        def reset_parameters(self):
            return None

        def forward(self, x):
            weight, bias = self.weight.to(x), self.bias.to(x)
            return torch.nn.functional.group_norm(x, self.num_groups, weight, bias, self.eps)


@contextlib.contextmanager
def using_forge_operations(
    operations=None, device=None, dtype=None, manual_cast_enabled=False, bnb_dtype=None
):
    before = {name: getattr(torch.nn, name) for name in ("Conv2d", "GroupNorm")}
    try:
        for name in before:
            setattr(torch.nn, name, getattr(ForgeOperations, name))
        yield
    finally:
        for name, kind in before.items():
            setattr(torch.nn, name, kind)
