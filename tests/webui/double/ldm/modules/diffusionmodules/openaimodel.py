"""Double of ldm/modules/diffusionmodules/openaimodel.py: a UNet of two levels, and a smaller one.

The surface was read in Stability-AI/stablediffusion cf1d67a.
`th` is the name through which the WebUI swaps torch.
"""

import torch as th
import torch.nn.functional as F
from torch import nn

from ldm.modules.attention import BasicTransformerBlock, SpatialTransformer
from ldm.modules.diffusionmodules.util import GroupNorm32


class TimestepBlock(nn.Module):
    def forward(self, x, emb):
        raise NotImplementedError


class TimestepEmbedSequential(nn.Sequential, TimestepBlock):
    def forward(self, x, emb, context=None):
        for layer in self:
            if isinstance(layer, TimestepBlock):
                x = layer(x, emb)
            else:
                x = layer(x, context) if isinstance(layer, SpatialTransformer) else layer(x)
        return x


class Upsample(nn.Module):
    def __init__(self, channels, use_conv, dims=2, out_channels=None, padding=1):
        super().__init__()
        self.channels, self.out_channels = channels, out_channels or channels
        self.use_conv, self.dims = use_conv, dims
        self.conv = nn.Conv2d(channels, self.out_channels, 3, padding=padding)

    def forward(self, x):
        return self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))


class Downsample(nn.Module):
    def __init__(self, channels, use_conv, dims=2, out_channels=None, padding=1):
        super().__init__()
        self.channels, self.out_channels = channels, out_channels or channels
        self.use_conv, self.dims = use_conv, dims
        self.op = nn.Conv2d(channels, self.out_channels, 3, stride=2, padding=padding)

    def forward(self, x):
        return self.op(x)


class ResBlock(TimestepBlock):
    def __init__(
        self,
        channels,
        emb_channels,
        dropout,
        out_channels=None,
        use_conv=False,
        use_scale_shift_norm=False,
        dims=2,
        use_checkpoint=False,
        up=False,
        down=False,
    ):
        super().__init__()
        wide = out_channels or channels
        self.channels, self.out_channels = channels, wide
        self.use_scale_shift_norm, self.updown = use_scale_shift_norm, up or down
        first, last = (nn.Conv2d(c, wide, 3, padding=1) for c in (channels, wide))
        self.in_layers = nn.Sequential(GroupNorm32(8, channels), nn.SiLU(), first)
        self.h_upd = self.x_upd = nn.Identity()
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb_channels, wide))
        norm = GroupNorm32(8, wide)
        self.out_layers = nn.Sequential(norm, nn.SiLU(), nn.Dropout(dropout), last)
        same = wide == channels
        self.skip_connection = nn.Identity() if same else nn.Conv2d(channels, wide, 1)

    def forward(self, x, emb):
        return self._forward(x, emb)

    def _forward(self, x, emb):
        h = self.in_layers(x) + self.emb_layers(emb).type(x.dtype)[:, :, None, None]
        return self.skip_connection(x) + self.out_layers(h)


class UNetModel(nn.Module):
    """One level with transformers and one without. The kinds are ldm's."""

    _SEQUENTIAL, _RES, _TRANSFORMER = TimestepEmbedSequential, ResBlock, SpatialTransformer
    _UP, _DOWN = Upsample, Downsample

    def __init__(self, channels=32, heads=2, d_head=40, context_dim=24):
        super().__init__()
        self.dtype, self.model_channels = th.float32, channels
        emb, wide = 4 * channels, 2 * channels
        one, res = self._SEQUENTIAL, self._RES
        self.time_embed = nn.Sequential(nn.Linear(1, emb), nn.SiLU(), nn.Linear(emb, emb))

        def attended():
            return self._TRANSFORMER(channels, heads, d_head, context_dim=context_dim)

        self.input_blocks = nn.ModuleList(
            [
                one(nn.Conv2d(4, channels, 3, padding=1)),
                one(res(channels, emb, 0.0), attended()),
                one(self._DOWN(channels, True)),
                one(res(channels, emb, 0.0, wide)),
            ]
        )
        self.middle_block = one(res(wide, emb, 0.0))
        self.output_blocks = nn.ModuleList(
            [
                one(res(2 * wide, emb, 0.0, wide)),
                one(res(wide + channels, emb, 0.0, wide), self._UP(wide, True)),
                one(res(wide + channels, emb, 0.0, channels), attended()),
                one(res(2 * channels, emb, 0.0, channels), attended()),
            ]
        )
        last = nn.Conv2d(channels, 4, 3, padding=1)
        self.out = nn.Sequential(GroupNorm32(8, channels), nn.SiLU(), last)

    def forward(self, x, timesteps=None, context=None, y=None, **kwargs):
        emb = self.time_embed(timesteps[:, None].to(x.dtype))
        h, kept = x, []
        for module in self.input_blocks:
            h = module(h, emb, context)
            kept.append(h)
        h = self.middle_block(h, emb, context)
        for module in self.output_blocks:
            skip = kept.pop()
            if h.shape[-2:] != skip.shape[-2:]:  # the WebUI's `th.cat`
                h = F.interpolate(h, skip.shape[-2:], mode="nearest")
            h = module(th.cat([h, skip], dim=1), emb, context)
        return self.out(h)


class _SmallUNet(nn.Module):
    """One level of attention and nothing else, for all that is not about UNets."""

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
