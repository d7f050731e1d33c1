"""Double of ldm's UNetModel and its blocks, all in one file.

The surface was read in Stability-AI/stablediffusion cf1d67a and Stability-AI/generative-models:
names of classes and children, signatures of forwards, what is added to what.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch user knows
from torch import nn


class GroupNorm32(nn.GroupNorm):
    """The real one gives float32 to torch's, which on a CPU refuses weights of another dtype."""

    def forward(self, x: Any) -> Any:
        return super().forward(x).type(x.dtype)


def normalization(channels: int) -> GroupNorm32:
    return GroupNorm32(8, channels)


class CrossAttention(nn.Module):
    def __init__(
        self, query_dim: int, context_dim: int | None = None, heads: int = 4, dim_head: int = 8
    ) -> None:
        super().__init__()
        inner = heads * dim_head
        context_dim = query_dim if context_dim is None else context_dim
        self.scale, self.heads = dim_head**-0.5, heads
        self.to_q = nn.Linear(query_dim, inner, bias=False)
        self.to_k = nn.Linear(context_dim, inner, bias=False)
        self.to_v = nn.Linear(context_dim, inner, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, query_dim), nn.Dropout(0.0))

    def forward(self, x: Any, context: Any = None, mask: Any = None) -> Any:
        context = x if context is None else context
        layers = ((self.to_q, x), (self.to_k, context), (self.to_v, context))
        q, k, v = (
            layer(source).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, source in layers
        )
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale)
        return self.to_out(out.transpose(1, 2).flatten(2))


class GEGLU(nn.Module):
    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim_in, 2 * dim_out)

    def forward(self, x: Any) -> Any:
        first, second = self.proj(x).chunk(2, dim=-1)
        return first * F.gelu(second)


class FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net = nn.Sequential(GEGLU(dim, 4 * dim), nn.Dropout(0.0), nn.Linear(4 * dim, dim))

    def forward(self, x: Any) -> Any:
        return self.net(x)


class BasicTransformerBlock(nn.Module):
    def __init__(self, dim: int, heads: int, dim_head: int, context_dim: int) -> None:
        super().__init__()
        self.disable_self_attn = False
        self.attn1 = CrossAttention(dim, None, heads, dim_head)
        self.ff = FeedForward(dim)
        self.attn2 = CrossAttention(dim, context_dim, heads, dim_head)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))
        self.checkpoint = False

    def forward(self, x: Any, context: Any = None) -> Any:
        return self._forward(x, context)

    def _forward(self, x: Any, context: Any = None) -> Any:
        x = x + self.attn1(self.norm1(x), context=None)
        x = x + self.attn2(self.norm2(x), context=context)
        return x + self.ff(self.norm3(x))


class SpatialTransformer(nn.Module):
    def __init__(
        self, channels: int, heads: int, dim_head: int, depth: int, context_dim: int, linear: bool
    ) -> None:
        super().__init__()
        inner = heads * dim_head
        self.in_channels, self.use_linear = channels, linear
        self.norm = nn.GroupNorm(8, channels, eps=1e-6)
        self.proj_in = nn.Linear(channels, inner) if linear else nn.Conv2d(channels, inner, 1)
        self.transformer_blocks = nn.ModuleList(
            [BasicTransformerBlock(inner, heads, dim_head, context_dim) for _ in range(depth)]
        )
        self.proj_out = nn.Linear(inner, channels) if linear else nn.Conv2d(inner, channels, 1)

    def forward(self, x: Any, context: Any = None) -> Any:
        contexts = context if isinstance(context, list) else [context]
        batch, _, height, width = x.shape
        h = self.norm(x)
        h = h if self.use_linear else self.proj_in(h)
        h = h.flatten(2).transpose(1, 2).contiguous()
        h = self.proj_in(h) if self.use_linear else h
        for index, block in enumerate(self.transformer_blocks):
            h = block(h, context=contexts[index if len(contexts) > 1 else 0])
        h = self.proj_out(h) if self.use_linear else h
        h = h.transpose(1, 2).reshape(batch, -1, height, width)
        return x + (h if self.use_linear else self.proj_out(h))


class Upsample(nn.Module):
    def __init__(self, channels: int, use_conv: bool = True) -> None:
        super().__init__()
        self.channels, self.use_conv, self.dims = channels, use_conv, 2
        if use_conv:
            self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Any) -> Any:
        x = F.interpolate(x, scale_factor=2, mode="nearest")
        return self.conv(x) if self.use_conv else x


class Downsample(nn.Module):
    def __init__(self, channels: int, use_conv: bool = True) -> None:
        super().__init__()
        self.channels, self.use_conv, self.dims = channels, use_conv, 2
        conv = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.op = conv if use_conv else nn.AvgPool2d(kernel_size=2, stride=2)

    def forward(self, x: Any) -> Any:
        return self.op(x)


class TimestepBlock(nn.Module):
    """Who takes the embedding of the time as well."""


class ResBlock(TimestepBlock):
    def __init__(
        self,
        channels: int,
        emb_channels: int,
        out_channels: int,
        use_scale_shift_norm: bool = False,
        sampler: type[nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.channels, self.out_channels = channels, out_channels
        self.updown, self.use_scale_shift_norm = sampler is not None, use_scale_shift_norm
        self.in_layers = nn.Sequential(
            normalization(channels), nn.SiLU(), nn.Conv2d(channels, out_channels, 3, padding=1)
        )
        self.h_upd, self.x_upd = (
            nn.Identity() if sampler is None else sampler(channels, False) for _ in range(2)
        )
        wide = 2 * out_channels if use_scale_shift_norm else out_channels
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb_channels, wide))
        self.out_layers = nn.Sequential(
            normalization(out_channels),
            nn.SiLU(),
            nn.Dropout(0.0),
            nn.Conv2d(out_channels, out_channels, 3, padding=1),
        )
        same = channels == out_channels
        self.skip_connection = nn.Identity() if same else nn.Conv2d(channels, out_channels, 1)

    def forward(self, x: Any, emb: Any) -> Any:
        return self._forward(x, emb)

    def _forward(self, x: Any, emb: Any) -> Any:
        h = self.in_layers[:-1](x)
        if self.updown:
            h, x = self.h_upd(h), self.x_upd(x)
        h = self.in_layers[-1](h)
        emb = self.emb_layers(emb).type(h.dtype)[:, :, None, None]
        if self.use_scale_shift_norm:
            scale, shift = torch.chunk(emb, 2, dim=1)
            h = self.out_layers[0](h) * (1 + scale) + shift
            return self.skip_connection(x) + self.out_layers[1:](h)
        return self.skip_connection(x) + self.out_layers(h + emb)


class TimestepEmbedSequential(nn.Sequential):
    def forward(self, x: Any, emb: Any, context: Any = None) -> Any:  # type: ignore[override]
        for layer in self:
            if isinstance(layer, TimestepBlock):
                x = layer(x, emb)
            elif isinstance(layer, SpatialTransformer):
                x = layer(x, context)
            else:
                x = layer(x)
        return x


class UNetModel(nn.Module):
    """Two levels: one with transformers and one without."""

    def __init__(
        self,
        in_channels: int = 4,
        channels: int = 32,
        context_dim: int = 48,
        depth: int = 1,
        linear: bool = False,
        use_scale_shift_norm: bool = False,
        resblock_updown: bool = False,
    ) -> None:
        super().__init__()
        wide, emb = 2 * channels, 4 * channels
        self.model_channels = channels
        self.time_embed = nn.Sequential(nn.Linear(channels, emb), nn.SiLU(), nn.Linear(emb, emb))

        def attended(width: int) -> SpatialTransformer:
            return SpatialTransformer(width, 4, width // 4, depth, context_dim, linear)

        def residual(*widths: int, sampler: type[nn.Module] | None = None) -> ResBlock:
            return ResBlock(widths[0], emb, widths[1], use_scale_shift_norm, sampler)

        def sampled(sampler: type[nn.Module], width: int) -> nn.Module:
            return residual(width, width, sampler=sampler) if resblock_updown else sampler(width)

        one = TimestepEmbedSequential
        self.input_blocks = nn.ModuleList(
            [
                one(nn.Conv2d(in_channels, channels, 3, padding=1)),
                one(residual(channels, channels), attended(channels)),
                one(sampled(Downsample, channels)),
                one(residual(channels, wide)),
            ]
        )
        self.middle_block = one(residual(wide, wide), attended(wide), residual(wide, wide))
        self.output_blocks = nn.ModuleList(
            [
                one(residual(2 * wide, wide)),
                one(residual(wide + channels, wide), sampled(Upsample, wide)),
                one(residual(wide + channels, channels), attended(channels)),
                one(residual(2 * channels, channels), attended(channels)),
            ]
        )
        last = nn.Conv2d(channels, 4, 3, padding=1)
        self.out = nn.Sequential(normalization(channels), nn.SiLU(), last)

    def forward(self, x: Any, timesteps: Any, context: Any, control: Any = None) -> Any:
        half = self.model_channels // 2
        rates = torch.exp(torch.arange(half, device=x.device).float() * (-9.2 / half))
        angles = timesteps[:, None].float() * rates[None]
        emb = self.time_embed(torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype))
        kept = []
        for block in self.input_blocks:
            x = block(x, emb, context)
            kept.append(x)
        x = self.middle_block(x, emb, context)
        if control is not None:
            x = x + control
        for block in self.output_blocks:
            skip = kept.pop()
            if x.shape[-2:] != skip.shape[-2:]:
                x = F.interpolate(x, skip.shape[-2:], mode="nearest")
            x = block(torch.cat([x, skip], 1), emb, context)
        return self.out(x)
