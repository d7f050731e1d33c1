"""Double of ldm/modules/diffusionmodules/model.py.

The surface was read in Stability-AI/stablediffusion cf1d67a.
AttnBlock as there; Encoder and Decoder with its names (conv_in, mid.block_1, mid.attn_1), tiny.
"""

import torch
import torch.nn.functional as F
from torch import nn


def nonlinearity(x):
    return x * torch.sigmoid(x)


def normalize(in_channels):
    return nn.GroupNorm(num_groups=8, num_channels=in_channels, eps=1e-6, affine=True)


class AttnBlock(nn.Module):
    def __init__(self, in_channels):
        super().__init__()
        self.in_channels = in_channels
        self.norm = normalize(in_channels)
        self.q, self.k, self.v, self.proj_out = (
            nn.Conv2d(in_channels, in_channels, kernel_size=1) for _ in range(4)
        )

    def forward(self, x):
        normed = self.norm(x)
        q, k, v = (layer(normed).flatten(2) for layer in (self.q, self.k, self.v))
        weights = torch.bmm(q.transpose(1, 2), k) * x.shape[1] ** -0.5
        out = torch.bmm(v, weights.softmax(dim=2).transpose(1, 2))
        return x + self.proj_out(out.reshape(x.shape))


class ResnetBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm1, self.norm2 = normalize(channels), normalize(channels)
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x, temb=None):
        hidden = self.conv1(nonlinearity(self.norm1(x)))
        return x + self.conv2(nonlinearity(self.norm2(hidden)))


class Middle(nn.Module):
    def __init__(self, channels, attention):
        super().__init__()
        self.block_1 = ResnetBlock(channels)
        self.attn_1 = attention(channels)
        self.block_2 = ResnetBlock(channels)

    def forward(self, x):
        return self.block_2(self.attn_1(self.block_1(x)))


class Encoder(nn.Module):
    def __init__(self, channels=16, attention=AttnBlock):
        super().__init__()
        self.conv_in = nn.Conv2d(3, channels, 3, padding=1)
        self.mid = Middle(channels, attention)
        self.norm_out = normalize(channels)
        self.conv_out = nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, x):
        hidden = self.mid(F.avg_pool2d(self.conv_in(x), 8))
        return self.conv_out(nonlinearity(self.norm_out(hidden)))


class Decoder(nn.Module):
    def __init__(self, channels=16, attention=AttnBlock):
        super().__init__()
        self.conv_in = nn.Conv2d(4, channels, 3, padding=1)
        self.mid = Middle(channels, attention)
        self.norm_out = normalize(channels)
        self.conv_out = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, z):
        hidden = self.mid(self.conv_in(z))
        hidden = F.interpolate(hidden, scale_factor=8.0, mode="nearest")
        return self.conv_out(nonlinearity(self.norm_out(hidden)))
