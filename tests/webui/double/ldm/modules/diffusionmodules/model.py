"""Double of ldm/modules/diffusionmodules/model.py.

The surface was read in Stability-AI/stablediffusion cf1d67a.
Encoder and Decoder with its arguments, names and order of work; GroupNorm has 8 groups, not 32.
sgm's double executes this file under its own name.
"""

import torch
import torch.nn.functional as F
from torch import nn


def nonlinearity(x):
    return x * torch.sigmoid(x)


def Normalize(in_channels, num_groups=8):  # noqa: N802
    return nn.GroupNorm(num_groups=num_groups, num_channels=in_channels, eps=1e-6, affine=True)


class Upsample(nn.Module):
    def __init__(self, in_channels, with_conv):
        super().__init__()
        self.with_conv = with_conv
        if with_conv:
            self.conv = nn.Conv2d(in_channels, in_channels, 3, padding=1)

    def forward(self, x):
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.conv(x) if self.with_conv else x


class Downsample(nn.Module):
    def __init__(self, in_channels, with_conv):
        super().__init__()
        self.with_conv = with_conv
        if with_conv:
            self.conv = nn.Conv2d(in_channels, in_channels, 3, stride=2)

    def forward(self, x):
        return self.conv(F.pad(x, (0, 1, 0, 1))) if self.with_conv else F.avg_pool2d(x, 2)


class ResnetBlock(nn.Module):
    def __init__(
        self,
        *,
        in_channels,
        out_channels=None,
        conv_shortcut=False,
        dropout,
        temb_channels=512,
    ):
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels or in_channels
        self.norm1 = Normalize(in_channels)
        self.conv1 = nn.Conv2d(in_channels, self.out_channels, 3, padding=1)
        if temb_channels > 0:
            self.temb_proj = nn.Linear(temb_channels, self.out_channels)
        self.norm2 = Normalize(self.out_channels)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(self.out_channels, self.out_channels, 3, padding=1)
        if self.in_channels != self.out_channels:
            self.nin_shortcut = nn.Conv2d(in_channels, self.out_channels, 1)

    def forward(self, x, temb):
        h = self.conv1(nonlinearity(self.norm1(x)))
        h = self.conv2(self.dropout(nonlinearity(self.norm2(h))))
        return (x if self.in_channels == self.out_channels else self.nin_shortcut(x)) + h


class AttnBlock(nn.Module):
    def __init__(self, in_channels):
        super().__init__()
        self.in_channels = in_channels
        self.norm = Normalize(in_channels)
        self.q, self.k, self.v, self.proj_out = (
            nn.Conv2d(in_channels, in_channels, kernel_size=1) for _ in range(4)
        )

    def forward(self, x):
        normed = self.norm(x)
        q, k, v = (layer(normed).flatten(2) for layer in (self.q, self.k, self.v))
        weights = torch.bmm(q.transpose(1, 2), k) * x.shape[1] ** -0.5
        out = torch.bmm(v, weights.softmax(dim=2).transpose(1, 2))
        return x + self.proj_out(out.reshape(x.shape))


def make_attn(in_channels, attn_type="vanilla", attn_kwargs=None):
    return nn.Identity(in_channels) if attn_type == "none" else AttnBlock(in_channels)


class _Coder(nn.Module):
    """What Encoder and Decoder share; the real ones repeat it."""

    def level(self, before, width, blocks, attention, dropout):
        level = nn.Module()
        widths = [before] + [width] * blocks
        level.block = nn.ModuleList(
            ResnetBlock(in_channels=a, out_channels=b, temb_channels=0, dropout=dropout)
            for a, b in zip(widths[:-1], widths[1:], strict=True)
        )
        level.attn = nn.ModuleList(make_attn(width) for _ in range(blocks if attention else 0))
        return level

    def middle(self, width, dropout, attn_type):
        mid = nn.Module()
        mid.block_1 = ResnetBlock(in_channels=width, temb_channels=0, dropout=dropout)
        mid.attn_1 = make_attn(width, attn_type)
        mid.block_2 = ResnetBlock(in_channels=width, temb_channels=0, dropout=dropout)
        return mid

    @staticmethod
    def run_level(level, h):
        for index, block in enumerate(level.block):
            h = block(h, None)
            if len(level.attn) > 0:
                h = level.attn[index](h)
        return h

    def run_middle(self, h):
        return self.mid.block_2(self.mid.attn_1(self.mid.block_1(h, None)), None)


class Encoder(_Coder):
    def __init__(
        self,
        *,
        ch,
        out_ch,
        ch_mult=(1, 2, 4, 8),
        num_res_blocks,
        attn_resolutions,
        dropout=0.0,
        resamp_with_conv=True,
        in_channels,
        resolution,
        z_channels,
        double_z=True,
        use_linear_attn=False,
        attn_type="vanilla",
        **ignore_kwargs,
    ):
        super().__init__()
        self.num_resolutions, self.num_res_blocks = len(ch_mult), num_res_blocks
        self.conv_in = nn.Conv2d(in_channels, ch, 3, padding=1)
        self.down = nn.ModuleList()
        width = ch
        for i_level, factor in enumerate(ch_mult):
            attention = resolution // 2**i_level in attn_resolutions
            down = self.level(width, ch * factor, num_res_blocks, attention, dropout)
            width = ch * factor
            if i_level != self.num_resolutions - 1:
                down.downsample = Downsample(width, resamp_with_conv)
            self.down.append(down)
        self.mid = self.middle(width, dropout, attn_type)
        self.norm_out = Normalize(width)
        self.conv_out = nn.Conv2d(width, 2 * z_channels if double_z else z_channels, 3, padding=1)

    def forward(self, x):
        h = self.conv_in(x)
        for i_level in range(self.num_resolutions):
            h = self.run_level(self.down[i_level], h)
            if i_level != self.num_resolutions - 1:
                h = self.down[i_level].downsample(h)
        return self.conv_out(nonlinearity(self.norm_out(self.run_middle(h))))


class Decoder(_Coder):
    def __init__(
        self,
        *,
        ch,
        out_ch,
        ch_mult=(1, 2, 4, 8),
        num_res_blocks,
        attn_resolutions,
        dropout=0.0,
        resamp_with_conv=True,
        in_channels,
        resolution,
        z_channels,
        give_pre_end=False,
        tanh_out=False,
        use_linear_attn=False,
        attn_type="vanilla",
        **ignorekwargs,
    ):
        super().__init__()
        self.num_resolutions, self.num_res_blocks = len(ch_mult), num_res_blocks
        self.give_pre_end, self.tanh_out = give_pre_end, tanh_out
        width = ch * ch_mult[-1]
        self.conv_in = nn.Conv2d(z_channels, width, 3, padding=1)
        self.mid = self.middle(width, dropout, attn_type)
        self.up = nn.ModuleList()
        for i_level in reversed(range(self.num_resolutions)):
            attention = resolution // 2**i_level in attn_resolutions
            up = self.level(width, ch * ch_mult[i_level], num_res_blocks + 1, attention, dropout)
            width = ch * ch_mult[i_level]
            if i_level != 0:
                up.upsample = Upsample(width, resamp_with_conv)
            self.up.insert(0, up)
        self.norm_out = Normalize(width)
        self.conv_out = nn.Conv2d(width, out_ch, 3, padding=1)

    def forward(self, z):
        self.last_z_shape = z.shape
        h = self.run_middle(self.conv_in(z))
        for i_level in reversed(range(self.num_resolutions)):
            h = self.run_level(self.up[i_level], h)
            if i_level != 0:
                h = self.up[i_level].upsample(h)
        if self.give_pre_end:
            return h
        h = self.conv_out(nonlinearity(self.norm_out(h)))
        return torch.tanh(h) if self.tanh_out else h
