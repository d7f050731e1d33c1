"""Double of ldm/modules/diffusionmodules/openaimodel.py.

The surface was read in Stability-AI/stablediffusion cf1d67a.
`th` is the name through which the WebUI swaps torch; the UNet has one attention level.
"""

import torch as th
from torch import nn

from ldm.modules.attention import BasicTransformerBlock


class UNetModel(nn.Module):
    def __init__(
        self, block=BasicTransformerBlock, channels=32, heads=2, d_head=40, context_dim=24
    ):
        super().__init__()
        self.dtype = th.float32
        self.time_embed = nn.Linear(1, channels)
        self.conv_in = nn.Conv2d(4, channels, 3, padding=1)
        self.transformer_blocks = nn.ModuleList(
            [block(channels, heads, d_head, context_dim=context_dim)]
        )
        self.out = nn.Conv2d(2 * channels, 4, 3, padding=1)

    def forward(self, x, timesteps=None, context=None, y=None, **kwargs):
        stem = self.conv_in(x) + self.time_embed(timesteps[:, None].to(x.dtype))[:, :, None, None]
        hidden = stem.flatten(2).transpose(1, 2)
        for block in self.transformer_blocks:
            hidden = block(hidden, context=context)
        hidden = hidden.transpose(1, 2).reshape(stem.shape)
        return self.out(th.cat([hidden, stem], dim=1))
