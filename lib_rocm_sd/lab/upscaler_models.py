"""Upscalers of the usual shapes, with random weights, for benchmarks and tests: RRDBNet (ESRGAN,
Real-ESRGAN) and SRVGGNetCompact, computed and named as in BasicSR, which need not be installed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class ResidualDenseBlock(nn.Module):
    """Five convolutions, each of all images before it."""

    def __init__(self, width: int, growth: int = 32) -> None:
        super().__init__()
        widths = range(width, width + 5 * growth, growth)
        convs = [nn.Conv2d(taken, growth, 3, padding=1) for taken in widths[:-1]]
        self.conv1, self.conv2, self.conv3, self.conv4 = convs
        self.conv5 = nn.Conv2d(widths[-1], width, 3, padding=1)
        self.lrelu = nn.LeakyReLU(0.2, inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = [x]
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            images.append(self.lrelu(conv(torch.cat(images, 1))))
        return self.conv5(torch.cat(images, 1)) * 0.2 + x  # type: ignore[no-any-return]


class RRDB(nn.Module):
    """Three dense blocks with a residual around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rdb1, self.rdb2, self.rdb3 = (ResidualDenseBlock(width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rdb3(self.rdb2(self.rdb1(x))) * 0.2 + x  # type: ignore[no-any-return]


class RRDBNet(nn.Module):
    """x4 where `scale` is 4; for 2 and 1 pixels become channels first."""

    def __init__(
        self, scale: int = 4, width: int = 64, blocks: int = 23, channels: int = 3
    ) -> None:
        super().__init__()
        self.scale = scale
        self.conv_first = nn.Conv2d(channels * (4 // scale) ** 2, width, 3, padding=1)
        self.body = nn.Sequential(*(RRDB(width) for _ in range(blocks)))
        alike = [nn.Conv2d(width, width, 3, padding=1) for _ in range(4)]
        self.conv_body, self.conv_up1, self.conv_up2, self.conv_hr = alike
        self.conv_last = nn.Conv2d(width, channels, 3, padding=1)
        self.lrelu = nn.LeakyReLU(0.2, inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale in (1, 2):
            x = F.pixel_unshuffle(x, 4 // self.scale)
        x = self.conv_first(x)
        x = x + self.conv_body(self.body(x))
        for conv in (self.conv_up1, self.conv_up2):
            x = self.lrelu(conv(F.interpolate(x, scale_factor=2, mode="nearest")))
        return self.conv_last(self.lrelu(self.conv_hr(x)))  # type: ignore[no-any-return]


class SRVGGNetCompact(nn.Module):
    """Convolutions with a PReLU each, and the picture itself, enlarged, added."""

    def __init__(self, scale: int = 4, width: int = 64, convs: int = 32, channels: int = 3) -> None:
        super().__init__()
        self.upscale = scale
        self.body = nn.ModuleList()
        taken = channels
        for _ in range(convs + 1):
            self.body += [nn.Conv2d(taken, width, 3, padding=1), nn.PReLU(width)]
            taken = width
        self.body.append(nn.Conv2d(width, channels * scale**2, 3, padding=1))
        self.upsampler = nn.PixelShuffle(scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.body:
            y = layer(y)
        base = F.interpolate(x, scale_factor=self.upscale, mode="nearest")
        return self.upsampler(y) + base  # type: ignore[no-any-return]


def settle(module: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights, drawn on the CPU, at which pictures stay within their range; no gradients."""
    generator = torch.Generator("cpu").manual_seed(seed)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            values = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(values * (parameter.numel() / parameter.shape[0]) ** -0.5)
        else:
            values = torch.rand(parameter.shape, generator=generator)
            parameter.data.copy_(values / 4)
    return module.eval().requires_grad_(False)
