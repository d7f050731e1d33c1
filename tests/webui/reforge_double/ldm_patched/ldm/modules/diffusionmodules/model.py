"""Double of ldm_patched/ldm/modules/diffusionmodules/model.py: ldm's, of reForge's layers.

The surface was read in Panchovix/stable-diffusion-webui-reForge 3b56b268.
"""

from pathlib import Path

import ldm.modules.diffusionmodules.model
import torch
from torch import nn

from ldm_patched.modules.ops import disable_weight_init as ops

_source = Path(ldm.modules.diffusionmodules.model.__file__)
exec(compile(_source.read_text(encoding="utf-8"), __file__, "exec"))
Normalize = globals()["Normalize"]


def pytorch_attention(q, k, v):
    rows = [t.flatten(2).transpose(1, 2)[:, None].contiguous() for t in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*rows)
    return out[:, 0].transpose(1, 2).reshape(q.shape)


def vae_attention():
    return pytorch_attention


class AttnBlock(nn.Module):
    def __init__(self, in_channels, conv_op=ops.Conv2d):
        super().__init__()
        self.in_channels = in_channels
        self.norm = Normalize(in_channels)
        self.q, self.k, self.v, self.proj_out = (
            conv_op(in_channels, in_channels, kernel_size=1) for _ in range(4)
        )
        self.optimized_attention = vae_attention()

    def forward(self, x):
        h = self.norm(x)
        return x + self.proj_out(self.optimized_attention(self.q(h), self.k(h), self.v(h)))
