"""Networks built and named as spandrel builds them, for tests where it is not installed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def _conv(taken: int, made: int, act: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(taken, made, 3, padding=1)]
    return nn.Sequential(*layers, *([nn.LeakyReLU(0.2, inplace=True)] if act else []))


class ResidualDenseBlock_5C(nn.Module):  # noqa: N801 - spandrel's name
    def __init__(self, nf: int, plus: bool) -> None:
        super().__init__()
        self.conv1x1 = nn.Conv2d(nf, 32, 1, bias=False) if plus else None
        for number in range(4):
            self.add_module(f"conv{number + 1}", _conv(nf + 32 * number, 32))
        self.conv5 = _conv(nf + 128, nf, act=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x1 = self.conv1(x)
        x2 = self.conv2(torch.cat((x, x1), 1))
        if self.conv1x1:
            x2 = x2 + self.conv1x1(x)
        x3 = self.conv3(torch.cat((x, x1, x2), 1))
        x4 = self.conv4(torch.cat((x, x1, x2, x3), 1))
        if self.conv1x1:
            x4 = x4 + x2
        return self.conv5(torch.cat((x, x1, x2, x3, x4), 1)) * 0.2 + x


class RRDB(nn.Module):
    def __init__(self, nf: int, plus: bool) -> None:
        super().__init__()
        self.RDB1, self.RDB2, self.RDB3 = (ResidualDenseBlock_5C(nf, plus) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.RDB3(self.RDB2(self.RDB1(x))) * 0.2 + x


class ShortcutBlock(nn.Module):
    def __init__(self, submodule: nn.Module) -> None:
        super().__init__()
        self.sub = submodule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.sub(x)


class RRDBNet(nn.Module):
    def __init__(
        self,
        in_nc: int = 3,
        out_nc: int = 3,
        num_filters: int = 64,
        num_blocks: int = 23,
        scale: int = 4,
        plus: bool = False,
        shuffle_factor: int | None = None,
    ) -> None:
        super().__init__()
        nf = num_filters
        self.shuffle_factor, self.scale = shuffle_factor, scale
        body = [*(RRDB(nf, plus) for _ in range(num_blocks)), nn.Conv2d(nf, nf, 3, padding=1)]
        ups: list[nn.Module] = []
        for _ in range({1: 0, 2: 1, 3: 1, 4: 2}[scale]):
            ups += [nn.Upsample(scale_factor=3 if scale == 3 else 2, mode="nearest")]
            ups += list(_conv(nf, nf))
        self.model = nn.Sequential(
            nn.Conv2d(in_nc, nf, 3, padding=1),
            ShortcutBlock(nn.Sequential(*body)),
            *ups,
            *_conv(nf, nf),
            nn.Conv2d(nf, out_nc, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.shuffle_factor:
            height, width = x.shape[2:]
            beyond = (0, -width % self.shuffle_factor, 0, -height % self.shuffle_factor)
            x = F.pad(x, beyond, "reflect") if any(beyond) else x
            x = self.model(torch.pixel_unshuffle(x, self.shuffle_factor))
            return x[:, :, : height * self.scale, : width * self.scale]
        return self.model(x)


class SRVGGNetCompact(nn.Module):
    def __init__(
        self,
        num_in_ch: int = 3,
        num_out_ch: int = 3,
        num_feat: int = 64,
        num_conv: int = 16,
        upscale: int = 4,
        act_type: str = "prelu",
    ) -> None:
        super().__init__()
        self.upscale = upscale
        self.body = nn.ModuleList()
        acts = {
            "prelu": lambda: nn.PReLU(num_feat),
            "relu": lambda: nn.ReLU(inplace=True),
            "leakyrelu": lambda: nn.LeakyReLU(0.1, inplace=True),
        }
        for taken in (num_in_ch, *[num_feat] * num_conv):
            self.body += [nn.Conv2d(taken, num_feat, 3, 1, 1), acts[act_type]()]
        self.body.append(nn.Conv2d(num_feat, num_out_ch * upscale**2, 3, 1, 1))
        self.upsampler = nn.PixelShuffle(upscale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x
        for layer in self.body:
            out = layer(out)
        out = self.upsampler(out)
        out += F.interpolate(x, scale_factor=self.upscale, mode="nearest")
        return out


class Conv3XC(nn.Module):
    def __init__(self, c_in: int, c_out: int, gain: int = 2) -> None:
        super().__init__()
        self.stride, self.has_relu = 1, False
        self.sk = nn.Conv2d(c_in, c_out, 1)
        self.conv = nn.Sequential(
            nn.Conv2d(c_in, c_in * gain, 1),
            nn.Conv2d(c_in * gain, c_out * gain, 3),
            nn.Conv2d(c_out * gain, c_out, 1),
        )
        self.eval_conv = nn.Conv2d(c_in, c_out, 3, padding=1)

    def update_params(self) -> None:
        """The sum of both ways as one convolution, found by what it makes of single pixels."""
        probe = torch.zeros(self.sk.in_channels, self.sk.in_channels, 5, 5).to(self.sk.weight)
        for channel in range(self.sk.in_channels):
            probe[channel, channel, 2, 2] = 1
        zero = self.conv(torch.zeros_like(probe[:1])) + self.sk(
            torch.zeros_like(probe[:1, :, 1:4, 1:4])
        )
        made = self.conv(probe) + self.sk(probe[:, :, 1:4, 1:4]) - zero
        self.eval_conv.weight.data = made.flip(2, 3).transpose(0, 1).contiguous()
        self.eval_conv.bias.data = zero[0, :, 1, 1].contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return self.conv(F.pad(x, (1, 1, 1, 1))) + self.sk(x)
        self.update_params()
        return self.eval_conv(x)


class SPAB(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.c1_r, self.c2_r, self.c3_r = (Conv3XC(channels, channels) for _ in range(3))
        self.act1 = nn.SiLU(inplace=True)
        self.act2 = nn.LeakyReLU(0.1, inplace=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        out1 = self.c1_r(x)
        out2 = self.c2_r(self.act1(out1))
        out3 = self.c3_r(self.act1(out2))
        attention = torch.sigmoid(out3) - 0.5
        return (out3 + x) * attention, out1, attention


class SPAN(nn.Module):
    def __init__(
        self,
        *,
        num_in_ch: int,
        num_out_ch: int,
        feature_channels: int = 48,
        upscale: int = 4,
        norm: bool = True,
        img_range: float = 255.0,
        rgb_mean: tuple[float, ...] = (0.4488, 0.4371, 0.4040),
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = num_in_ch, num_out_ch
        self.img_range = img_range
        self.mean = torch.Tensor(rgb_mean).view(1, 3, 1, 1)
        self.no_norm: torch.Tensor | None = None
        if not norm:
            del self.no_norm
            self.register_buffer("no_norm", torch.zeros(1))
        width = feature_channels
        self.conv_1 = Conv3XC(num_in_ch, width)
        for number in range(1, 7):
            self.add_module(f"block_{number}", SPAB(width))
        self.conv_cat = nn.Conv2d(width * 4, width, 1)
        self.conv_2 = Conv3XC(width, width)
        self.upsampler = nn.Sequential(
            nn.Conv2d(width, num_out_ch * upscale**2, 3, padding=1), nn.PixelShuffle(upscale)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.no_norm is None:
            self.mean = self.mean.type_as(x)
            x = (x - self.mean) * self.img_range
        first = self.conv_1(x)
        one, _, _ = self.block_1(first)
        out, _, _ = self.block_2(one)
        for block in (self.block_3, self.block_4, self.block_5):
            out, _, _ = block(out)
        out, inner, _ = self.block_6(out)
        return self.upsampler(self.conv_cat(torch.cat([first, self.conv_2(out), one, inner], 1)))
