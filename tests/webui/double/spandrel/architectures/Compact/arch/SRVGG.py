# ruff: noqa: N999
"""Double of spandrel.architectures.Compact.arch.SRVGG: Real-ESRGAN's compact network.

The surface was read in spandrel 0.3.4.
"""

import torch.nn as nn
import torch.nn.functional as F


class SRVGGNetCompact(nn.Module):
    def __init__(
        self, *, num_in_ch=3, num_out_ch=3, num_feat=64, num_conv=16, upscale=4, act_type="prelu"
    ):
        super().__init__()
        self.upscale = upscale
        self.body = nn.ModuleList()
        for width in (num_in_ch, *[num_feat] * num_conv):
            self.body.append(nn.Conv2d(width, num_feat, 3, 1, 1))
            self.body.append(nn.PReLU(num_parameters=num_feat))
        self.body.append(nn.Conv2d(num_feat, num_out_ch * upscale * upscale, 3, 1, 1))
        self.upsampler = nn.PixelShuffle(upscale)

    def forward(self, x):
        out = x
        for layer in self.body:
            out = layer(out)
        base = F.interpolate(x, scale_factor=self.upscale, mode="nearest")
        return self.upsampler(out) + base
