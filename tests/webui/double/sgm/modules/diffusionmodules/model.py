"""Double of sgm/modules/diffusionmodules/model.py: as ldm's, but AttnBlock is through SDPA,
and Decoder takes more arguments.

The surface was read in Stability-AI/generative-models 45c443b.
"""

from pathlib import Path

import ldm.modules.diffusionmodules.model
import torch.nn.functional as F
from torch import nn

_source = Path(ldm.modules.diffusionmodules.model.__file__)
exec(compile(_source.read_text(encoding="utf-8"), __file__, "exec"))
Normalize = globals()["Normalize"]
_Decoder = globals()["Decoder"]


class Decoder(_Decoder):
    def forward(self, z, **kwargs):
        return super().forward(z)


class AttnBlock(nn.Module):
    def __init__(self, in_channels):
        super().__init__()
        self.in_channels = in_channels
        self.norm = Normalize(in_channels)
        self.q, self.k, self.v, self.proj_out = (
            nn.Conv2d(in_channels, in_channels, kernel_size=1) for _ in range(4)
        )

    def attention(self, h_):
        normed = self.norm(h_)
        q, k, v = (
            layer(normed).flatten(2).transpose(1, 2)[:, None].contiguous()
            for layer in (self.q, self.k, self.v)
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return out[:, 0].transpose(1, 2).reshape(h_.shape)

    def forward(self, x, **kwargs):
        return x + self.proj_out(self.attention(x))
