"""Upscalers of the usual shapes, with random weights, for benchmarks and tests: RRDBNet (ESRGAN,
Real-ESRGAN) and SRVGGNetCompact, computed and named as in BasicSR, and SwinIR as in spandrel.
Neither need be installed.
"""

from __future__ import annotations

from typing import Any

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


class DropPath(nn.Module):
    """Drops nothing in evaluation, for which alone this is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Mlp(nn.Module):
    """Two linear layers with GELU between."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.act = nn.Linear(dim, hidden), nn.GELU()
        self.fc2, self.drop = nn.Linear(hidden, dim), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class WindowAttention(nn.Module):
    """Attention within each window, with a bias for every offset between two of its pixels."""

    relative_position_index: torch.Tensor

    def __init__(self, dim: int, window: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.dim, self.window_size, self.num_heads = dim, (window, window), heads
        self.scale = (dim // heads) ** -0.5
        span = 2 * window - 1
        self.relative_position_bias_table = nn.Parameter(torch.zeros(span**2, heads))
        row, column = torch.arange(window**2) // window, torch.arange(window**2) % window
        down = row[:, None] - row + window - 1
        across = column[:, None] - column + window - 1
        self.register_buffer("relative_position_index", down * span + across)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=bias), nn.Linear(dim, dim)
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        windows, count, dim = x.shape
        q, k, v = self.qkv(x).view(windows, count, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        scores = q * self.scale @ k.mT
        scores = scores + self.relative_position_bias_table[self.relative_position_index].permute(
            2, 0, 1
        )
        if mask is not None:
            scores = scores.unflatten(0, (-1, len(mask))) + mask[:, None]
            scores = scores.flatten(0, 1)
        made = self.attn_drop(self.softmax(scores)) @ v
        return self.proj_drop(self.proj(made.transpose(1, 2).reshape(windows, count, dim)))


class SwinTransformerBlock(nn.Module):
    """Attention in windows, which every second block rolls by half a window, and an Mlp."""

    def __init__(
        self, dim: int, heads: int, window: int, shift: int, ratio: float, bias: bool
    ) -> None:
        super().__init__()
        self.window_size, self.shift_size, self.num_heads = window, shift, heads
        self.norm1, self.attn = nn.LayerNorm(dim), WindowAttention(dim, window, heads, bias)
        self.drop_path = DropPath() if shift else nn.Identity()
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim, int(dim * ratio))

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """(N, H, W, C) to (N windows, pixels of a window, C)."""
        x = x.unflatten(1, (-1, self.window_size)).unflatten(3, (-1, self.window_size))
        return x.transpose(2, 3).flatten(3, 4).flatten(0, 2)

    def mask(self, height: int, width: int, like: torch.Tensor) -> torch.Tensor | None:
        """-100 between pixels that are neighbours only because they were rolled."""
        if not self.shift_size:
            return None
        areas = []
        for side in (height, width):
            place = torch.arange(side)
            areas.append(
                (place >= side - self.window_size).long() + (place >= side - self.shift_size)
            )
        area = self.split((3 * areas[0][:, None] + areas[1])[None, ..., None])[..., 0]
        return torch.where(area[:, None] == area[:, :, None], 0.0, -100.0).to(like)

    def forward(self, x: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        by, window = self.shift_size, self.window_size
        image = self.norm1(x).unflatten(1, size).roll((-by, -by), (1, 2))
        made = self.attn(self.split(image), self.mask(*size, x))
        made = made.unflatten(0, (len(x), size[0] // window, -1)).unflatten(3, (window, window))
        made = made.transpose(2, 3).flatten(3, 4).flatten(1, 2).roll((by, by), (1, 2))
        x = x + self.drop_path(made.flatten(1, 2))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class BasicLayer(nn.Module):
    """A group's blocks."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks, self.downsample = nn.ModuleList(blocks), None

    def forward(self, x: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, size)
        return x


class PatchEmbed(nn.Module):
    """(N, C, H, W) to (N, H W, C)."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(2).mT
        return x if self.norm is None else self.norm(x)


class PatchUnEmbed(nn.Module):
    """(N, H W, C) to (N, C, H, W)."""

    def forward(self, x: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        return x.mT.unflatten(2, size)


def _convs(dim: int, three: bool) -> nn.Module:
    if not three:
        return nn.Conv2d(dim, dim, 3, 1, 1)
    few = dim // 4
    return nn.Sequential(
        nn.Conv2d(dim, few, 3, 1, 1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(few, few, 1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(few, dim, 3, 1, 1),
    )


class RSTB(nn.Module):
    """A group of blocks, one convolution or three, and a residual around them."""

    def __init__(self, dim: int, blocks: list[nn.Module], three: bool) -> None:
        super().__init__()
        self.residual_group, self.conv = BasicLayer(blocks), _convs(dim, three)
        self.patch_embed, self.patch_unembed = PatchEmbed(), PatchUnEmbed()

    def forward(self, x: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        image = self.patch_unembed(self.residual_group(x, size), size)
        return self.patch_embed(self.conv(image)) + x


class Upsample(nn.Sequential):
    """Convolutions with a pixel shuffle each."""

    def __init__(self, scale: int, dim: int) -> None:
        factors = [3] if scale == 3 else [2] * (scale.bit_length() - 1)
        layers: list[nn.Module] = []
        for factor in factors:
            layers += [nn.Conv2d(dim, factor**2 * dim, 3, 1, 1), nn.PixelShuffle(factor)]
        super().__init__(*layers)


class UpsampleOneStep(nn.Sequential):
    """One convolution and one pixel shuffle."""

    def __init__(self, scale: int, dim: int, out: int) -> None:
        super().__init__(nn.Conv2d(dim, scale**2 * out, 3, 1, 1), nn.PixelShuffle(scale))


class SwinIR(nn.Module):
    """With each of its four ways to end, `upsampler`; the arguments are spandrel's. `img_size`: a
    size that spandrel makes masks for ahead; here they are made for each picture.
    """

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 64,
        in_chans: int = 3,
        embed_dim: int,
        depths: list[int],
        num_heads: list[int],
        window_size: int,
        mlp_ratio: float,
        qkv_bias: bool = True,
        patch_norm: bool = True,
        upscale: int,
        img_range: float = 1.0,
        upsampler: str,
        resi_connection: str = "1conv",
    ) -> None:
        super().__init__()
        dim, three = embed_dim, resi_connection == "3conv"
        self.start_unshuffle, self.img_range, self.upscale = 1, img_range, upscale
        self.upsampler, self.window_size = upsampler, window_size
        mean = (0.4488, 0.4371, 0.4040) if in_chans == 3 else (0.0,)
        self.mean = torch.tensor(mean).view(1, -1, 1, 1)
        self.conv_first = nn.Conv2d(in_chans, dim, 3, 1, 1)
        self.patch_embed = PatchEmbed(nn.LayerNorm(dim) if patch_norm else None)
        self.patch_unembed, self.pos_drop = PatchUnEmbed(), nn.Dropout(0.0)
        self.layers = nn.ModuleList()
        for depth, heads in zip(depths, num_heads, strict=True):
            shifts = [window_size // 2 * (index % 2) for index in range(depth)]
            kinds = (dim, heads, window_size)
            blocks: list[nn.Module] = [
                SwinTransformerBlock(*kinds, shift, mlp_ratio, qkv_bias) for shift in shifts
            ]
            self.layers.append(RSTB(dim, blocks, three))
        self.norm, self.conv_after_body = nn.LayerNorm(dim), _convs(dim, three)
        if upsampler == "pixelshuffledirect":
            self.upsample: Any = UpsampleOneStep(upscale, dim, in_chans)
            return
        if upsampler:
            self.conv_before_upsample = nn.Sequential(
                nn.Conv2d(dim, 64, 3, 1, 1), nn.LeakyReLU(inplace=True)
            )
        if upsampler == "pixelshuffle":
            self.upsample = Upsample(upscale, 64)
        if upsampler == "nearest+conv":
            self.conv_up1 = nn.Conv2d(64, 64, 3, 1, 1)
            if upscale == 4:
                self.conv_up2 = nn.Conv2d(64, 64, 3, 1, 1)
            self.conv_hr = nn.Conv2d(64, 64, 3, 1, 1)
            self.lrelu = nn.LeakyReLU(0.2, inplace=True)
        self.conv_last = nn.Conv2d(64 if upsampler else dim, in_chans, 3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[2:]
        beyond = (0, -width % self.window_size, 0, -height % self.window_size)
        x = F.pad(x, beyond, "reflect") if any(beyond) else x
        self.mean = self.mean.type_as(x)
        x = (x - self.mean) * self.img_range
        first = self.conv_first(x)
        size = (x.shape[2], x.shape[3])
        tokens = self.pos_drop(self.patch_embed(first))
        for layer in self.layers:
            tokens = layer(tokens, size)
        body = self.conv_after_body(self.patch_unembed(self.norm(tokens), size)) + first
        x = self._enlarged(body) if self.upsampler else x + self.conv_last(body)
        x = x / self.img_range + self.mean
        return x[:, :, : height * self.upscale, : width * self.upscale]

    def _enlarged(self, x: torch.Tensor) -> torch.Tensor:
        if self.upsampler == "pixelshuffledirect":
            return self.upsample(x)
        x = self.conv_before_upsample(x)
        if self.upsampler == "pixelshuffle":
            return self.conv_last(self.upsample(x))
        for conv in (self.conv_up1, getattr(self, "conv_up2", None)):
            if conv is not None:
                x = self.lrelu(conv(F.interpolate(x, scale_factor=2, mode="nearest")))
        return self.conv_last(self.lrelu(self.conv_hr(x)))


SWINIR_M: dict[str, Any] = {
    **{"window_size": 8, "mlp_ratio": 2.0, "upscale": 4},
    **{"embed_dim": 180, "depths": [6] * 6, "num_heads": [6] * 6, "upsampler": "pixelshuffle"},
}
"""The model for classical pictures."""
SWINIR_L: dict[str, Any] = {
    **{**SWINIR_M, "embed_dim": 240, "depths": [6] * 9, "num_heads": [8] * 9},
    **{"upsampler": "nearest+conv", "resi_connection": "3conv"},
}
"""The large model for real pictures."""


def settle(module: nn.Module, seed: int = 0) -> nn.Module:
    """Draw random weights by their fan-in, on the CPU; no gradients.

    Each block of an RRDBNet makes an image 1.2 times as large, and the convolution behind them
    takes that back. Dense blocks do not get the small weights that ESRGAN's training begins with
    (Wang and others, 2018): pictures then hardly depend on them, and what is wrong there is hidden.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            gain = (parameter.numel() / parameter.shape[0]) ** -0.5
            if name == "conv_body.weight":
                gain *= 1.2 ** -len(module.body)  # type: ignore[arg-type]
            parameter.data.copy_(gain * torch.randn(parameter.shape, generator=generator))
        else:
            values = torch.rand(parameter.shape, generator=generator)
            parameter.data.copy_(values / 4)
    return module.eval().requires_grad_(False)


def level(module: nn.Module) -> nn.Module:
    """Scale the last convolution, so that the result of a picture of random pixels lies around 0.5
    and what the convolution gives has a standard deviation of 0.15: half of an RRDBNet's values
    are black or white without. On the CPU, in float32.
    """
    *_, last = (each for each in module.modules() if isinstance(each, nn.Conv2d))
    generator = torch.Generator("cpu").manual_seed(0)
    kept: list[torch.Tensor] = []
    hook = last.register_forward_hook(lambda conv, args, made: kept.append(made))
    with torch.no_grad():
        picture = torch.rand(1, 3, 16, 16, generator=generator)
        beside = module(picture).mean() - kept[0].mean()
        hook.remove()
        std, mean = torch.std_mean(kept[0], (0, 2, 3))
        last.weight.mul_((0.15 / std)[:, None, None, None])
        assert last.bias is not None
        last.bias.sub_(mean).mul_(0.15 / std).add_(0.5 - beside)
    return module
