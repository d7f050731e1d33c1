"""Double of modules/models/sd3/sd3_impls.py: the VAE, of few channels.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
"""

import torch
import torch.nn.functional as F
from torch import nn


def Normalize(in_channels, num_groups=8, dtype=torch.float32, device=None):  # noqa: N802
    return nn.GroupNorm(num_groups, in_channels, eps=1e-6, dtype=dtype, device=device)


class ResnetBlock(nn.Module):
    def __init__(self, *, in_channels, out_channels=None):
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels or in_channels
        self.norm1 = Normalize(in_channels)
        self.conv1 = nn.Conv2d(in_channels, self.out_channels, 3, padding=1)
        self.norm2 = Normalize(self.out_channels)
        self.conv2 = nn.Conv2d(self.out_channels, self.out_channels, 3, padding=1)
        changes = self.in_channels != self.out_channels
        self.nin_shortcut = nn.Conv2d(in_channels, self.out_channels, 1) if changes else None
        self.swish = nn.SiLU(inplace=True)

    def forward(self, x):
        hidden = self.conv1(self.swish(self.norm1(x)))
        hidden = self.conv2(self.swish(self.norm2(hidden)))
        return (x if self.nin_shortcut is None else self.nin_shortcut(x)) + hidden


class AttnBlock(nn.Module):
    def __init__(self, in_channels):
        super().__init__()
        self.norm = Normalize(in_channels)
        self.q, self.k, self.v, self.proj_out = (
            nn.Conv2d(in_channels, in_channels, 1) for _ in range(4)
        )

    def forward(self, x):
        hidden = self.norm(x)
        q, k, v = (
            layer(hidden).flatten(2).transpose(1, 2)[:, None].contiguous()
            for layer in (self.q, self.k, self.v)
        )
        hidden = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj_out(hidden[:, 0].transpose(1, 2).reshape(x.shape))


class Downsample(nn.Module):
    def __init__(self, in_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, in_channels, 3, stride=2)

    def forward(self, x):
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    def __init__(self, in_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, in_channels, 3, padding=1)

    def forward(self, x):
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


def _blocks(before, width, count):
    widths = [before] + [width] * count
    return nn.ModuleList(
        ResnetBlock(in_channels=a, out_channels=b)
        for a, b in zip(widths[:-1], widths[1:], strict=True)
    )


def _middle(width):
    mid = nn.Module()
    mid.block_1 = ResnetBlock(in_channels=width)
    mid.attn_1 = AttnBlock(width)
    mid.block_2 = ResnetBlock(in_channels=width)
    return mid


class VAEEncoder(nn.Module):
    def __init__(self, ch=16, ch_mult=(1, 2, 2, 2), num_res_blocks=1, in_channels=3, z_channels=16):
        super().__init__()
        self.num_resolutions, self.num_res_blocks = len(ch_mult), num_res_blocks
        self.conv_in = nn.Conv2d(in_channels, ch, 3, padding=1)
        self.down = nn.ModuleList()
        width = ch
        for i_level, factor in enumerate(ch_mult):
            down = nn.Module()
            down.block = _blocks(width, ch * factor, num_res_blocks)
            down.attn = nn.ModuleList()
            width = ch * factor
            if i_level != self.num_resolutions - 1:
                down.downsample = Downsample(width)
            self.down.append(down)
        self.mid = _middle(width)
        self.norm_out = Normalize(width)
        self.conv_out = nn.Conv2d(width, 2 * z_channels, 3, padding=1)
        self.swish = nn.SiLU(inplace=True)

    def forward(self, x):
        h = self.conv_in(x)
        for down in self.down:
            for block in down.block:
                h = block(h)
            h = down.downsample(h) if hasattr(down, "downsample") else h
        h = self.mid.block_2(self.mid.attn_1(self.mid.block_1(h)))
        return self.conv_out(self.swish(self.norm_out(h)))


class VAEDecoder(nn.Module):
    def __init__(self, ch=16, out_ch=3, ch_mult=(1, 2, 2, 2), num_res_blocks=1, z_channels=16):
        super().__init__()
        self.num_resolutions, self.num_res_blocks = len(ch_mult), num_res_blocks
        width = ch * ch_mult[-1]
        self.conv_in = nn.Conv2d(z_channels, width, 3, padding=1)
        self.mid = _middle(width)
        self.up = nn.ModuleList()
        for i_level in reversed(range(self.num_resolutions)):
            up = nn.Module()
            up.block = _blocks(width, ch * ch_mult[i_level], num_res_blocks + 1)
            width = ch * ch_mult[i_level]
            if i_level != 0:
                up.upsample = Upsample(width)
            self.up.insert(0, up)
        self.norm_out = Normalize(width)
        self.conv_out = nn.Conv2d(width, out_ch, 3, padding=1)
        self.swish = nn.SiLU(inplace=True)

    def forward(self, z):
        hidden = self.mid.block_2(self.mid.attn_1(self.mid.block_1(self.conv_in(z))))
        for up in reversed(self.up):
            for block in up.block:
                hidden = block(hidden)
            hidden = up.upsample(hidden) if hasattr(up, "upsample") else hidden
        return self.conv_out(self.swish(self.norm_out(hidden)))


class SDVAE(nn.Module):
    """`dtype` is set by SD3Inferencer there."""

    def __init__(self):
        super().__init__()
        self.encoder = VAEEncoder()
        self.decoder = VAEDecoder()

    @property
    def dtype(self):
        return next(self.parameters()).dtype

    @torch.autocast("cuda", dtype=torch.float16)
    def decode(self, latent):
        return self.decoder(latent)

    @torch.autocast("cuda", dtype=torch.float16)
    def encode(self, image):
        mean, logvar = torch.chunk(self.encoder(image), 2, dim=1)
        return mean + torch.exp(0.5 * torch.clamp(logvar, -30.0, 20.0)) * 0.1
