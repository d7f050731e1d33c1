"""Double of ldm's and sgm's modules/diffusionmodules/model.py, written from its names and formulas.

Loaded by tests/vae/vae_models.py under the name of the module that it stands for.
"""

import torch
import torch.nn.functional as F
from torch import nn


def nonlinearity(x):
    return x * torch.sigmoid(x)


def group_norm(channels, groups):
    return nn.GroupNorm(groups, channels, eps=1e-6)


class Upsample(nn.Module):
    def __init__(self, channels, with_conv=True):
        super().__init__()
        self.with_conv = with_conv
        if with_conv:
            self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.conv(x) if self.with_conv else x


class Downsample(nn.Module):
    def __init__(self, channels, with_conv=True):
        super().__init__()
        self.with_conv = with_conv
        if with_conv:
            self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x):
        return self.conv(F.pad(x, (0, 1, 0, 1))) if self.with_conv else F.avg_pool2d(x, 2)


class ResnetBlock(nn.Module):
    def __init__(self, channels, out, groups, conv_shortcut=False, temb_channels=0, dropout=0.0):
        super().__init__()
        self.norm1 = group_norm(channels, groups)
        self.conv1 = nn.Conv2d(channels, out, 3, padding=1)
        self.norm2, self.conv2 = group_norm(out, groups), nn.Conv2d(out, out, 3, padding=1)
        self.dropout = nn.Dropout(dropout)
        if temb_channels:
            self.temb_proj = nn.Linear(temb_channels, out)
        if channels != out:
            if conv_shortcut:
                self.conv_shortcut = nn.Conv2d(channels, out, 3, padding=1)
            else:
                self.nin_shortcut = nn.Conv2d(channels, out, 1)

    def forward(self, x, temb=None):
        hidden = self.conv1(nonlinearity(self.norm1(x)))
        hidden = self.conv2(self.dropout(nonlinearity(self.norm2(hidden))))
        if hasattr(self, "conv_shortcut"):
            x = self.conv_shortcut(x)
        if hasattr(self, "nin_shortcut"):
            x = self.nin_shortcut(x)
        return x + hidden


class AttnBlock(nn.Module):
    def __init__(self, channels, groups):
        super().__init__()
        self.norm = group_norm(channels, groups)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x):
        normed = self.norm(x)
        q, k, v = (layer(normed).flatten(2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = (q @ k.transpose(1, 2) * x.shape[1] ** -0.5).softmax(-1) @ v
        return x + self.proj_out(mixed.transpose(1, 2).reshape(x.shape))


def middle(channels, groups, attention):
    mid = nn.Module()
    mid.block_1 = ResnetBlock(channels, channels, groups)
    mid.attn_1 = AttnBlock(channels, groups) if attention else nn.Identity()
    mid.block_2 = ResnetBlock(channels, channels, groups)
    return mid


def level(channels, out, groups, blocks, attention):
    made = nn.Module()
    widths = [channels] + [out] * blocks
    made.block = nn.ModuleList(
        ResnetBlock(a, b, groups) for a, b in zip(widths[:-1], widths[1:], strict=True)
    )
    made.attn = nn.ModuleList(AttnBlock(out, groups) for _ in range(blocks if attention else 0))
    return made


def run_level(made, x):
    for index, block in enumerate(made.block):
        x = block(x, None)
        if len(made.attn):
            x = made.attn[index](x)
    return x


class Encoder(nn.Module):
    def __init__(self, widths, groups=8, blocks=1, z=4, image=3, mid=True, inner=False):
        super().__init__()
        self.num_resolutions, self.num_res_blocks = len(widths), blocks
        self.conv_in = nn.Conv2d(image, widths[0], 3, padding=1)
        self.down = nn.ModuleList()
        before = [widths[0], *widths]
        for index, width in enumerate(widths):
            self.down.append(level(before[index], width, groups, blocks, inner and index == 1))
            if index < len(widths) - 1:
                self.down[-1].downsample = Downsample(width)
        self.mid = middle(widths[-1], groups, mid)
        self.norm_out = group_norm(widths[-1], groups)
        self.conv_out = nn.Conv2d(widths[-1], 2 * z, 3, padding=1)

    def forward(self, x):
        x = self.conv_in(x)
        for made in self.down:
            x = run_level(made, x)
            x = getattr(made, "downsample", nn.Identity())(x)
        x = self.mid.block_2(self.mid.attn_1(self.mid.block_1(x, None)), None)
        return self.conv_out(nonlinearity(self.norm_out(x)))


class Decoder(nn.Module):
    def __init__(self, widths, groups=8, blocks=1, z=4, image=3, mid=True, inner=False):
        super().__init__()
        self.num_resolutions, self.num_res_blocks = len(widths), blocks
        self.give_pre_end, self.tanh_out = False, False
        self.conv_in = nn.Conv2d(z, widths[-1], 3, padding=1)
        self.mid = middle(widths[-1], groups, mid)
        self.up = nn.ModuleList()
        before = widths[-1]
        for index in reversed(range(len(widths))):
            made = level(before, widths[index], groups, blocks + 1, inner and index == 1)
            if index:
                made.upsample = Upsample(widths[index])
            self.up.insert(0, made)
            before = widths[index]
        self.norm_out = group_norm(before, groups)
        self.conv_out = nn.Conv2d(before, image, 3, padding=1)

    def forward(self, z, **kwargs):
        x = self.conv_in(z)
        x = self.mid.block_2(self.mid.attn_1(self.mid.block_1(x, None)), None)
        for made in reversed(self.up):
            x = run_level(made, x)
            x = getattr(made, "upsample", nn.Identity())(x)
        if self.give_pre_end:
            return x
        x = self.conv_out(nonlinearity(self.norm_out(x)))
        return torch.tanh(x) if self.tanh_out else x
