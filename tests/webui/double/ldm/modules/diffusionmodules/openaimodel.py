"""Double of ldm/modules/diffusionmodules/openaimodel.py: a UNet of two levels, and a smaller one.

The surface was read in Stability-AI/stablediffusion cf1d67a.
`th` is the name through which the WebUI swaps torch.
"""

import torch as th
import torch.nn.functional as F
from torch import nn

from ldm.modules.attention import BasicTransformerBlock, SpatialTransformer
from ldm.modules.diffusionmodules.util import GroupNorm32, timestep_embedding


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
        if use_conv:
            self.conv = nn.Conv2d(channels, self.out_channels, 3, padding=padding)

    def forward(self, x):
        x = F.interpolate(x, scale_factor=2, mode="nearest")
        return self.conv(x) if self.use_conv else x


class Downsample(nn.Module):
    def __init__(self, channels, use_conv, dims=2, out_channels=None, padding=1):
        super().__init__()
        self.channels, self.out_channels = channels, out_channels or channels
        self.use_conv, self.dims = use_conv, dims
        conv = nn.Conv2d(channels, self.out_channels, 3, stride=2, padding=padding)
        self.op = conv if use_conv else nn.AvgPool2d(kernel_size=2, stride=2)

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
        sampler = Upsample if up else Downsample if down else nn.Identity
        self.h_upd, self.x_upd = sampler(channels, False), sampler(channels, False)
        shifts = 2 * wide if use_scale_shift_norm else wide
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb_channels, shifts))
        norm = GroupNorm32(8, wide)
        self.out_layers = nn.Sequential(norm, nn.SiLU(), nn.Dropout(dropout), last)
        same = wide == channels
        self.skip_connection = nn.Identity() if same else nn.Conv2d(channels, wide, 1)

    def forward(self, x, emb):
        return self._forward(x, emb)

    def _forward(self, x, emb):
        h = self.in_layers[:-1](x)
        if self.updown:
            h, x = self.h_upd(h), self.x_upd(x)
        h = self.in_layers[-1](h)
        emb = self.emb_layers(emb).type(h.dtype)[:, :, None, None]
        if self.use_scale_shift_norm:
            scale, shift = th.chunk(emb, 2, dim=1)
            h = self.out_layers[0](h) * (1 + scale) + shift
            return self.skip_connection(x) + self.out_layers[1:](h)
        return self.skip_connection(x) + self.out_layers(h + emb)


class UNetModel(nn.Module):
    """One level with transformers and one without. The kinds are ldm's.

    `depth_middle`: without it the middle is one residual block, which is enough for most tests.
    """

    _SEQUENTIAL, _RES, _TRANSFORMER = TimestepEmbedSequential, ResBlock, SpatialTransformer
    _UP, _DOWN = Upsample, Downsample

    def __init__(
        self,
        channels=32,
        heads=2,
        d_head=40,
        context_dim=24,
        in_channels=4,
        depth=1,
        depth_middle=0,
        linear=False,
        use_scale_shift_norm=False,
        resblock_updown=False,
    ):
        super().__init__()
        self.dtype, self.model_channels = th.float32, channels
        emb, wide = 4 * channels, 2 * channels
        one = self._SEQUENTIAL
        self.time_embed = nn.Sequential(nn.Linear(channels, emb), nn.SiLU(), nn.Linear(emb, emb))

        def attended(width=channels, depth=depth):
            size = d_head * width // channels
            settings = {"context_dim": context_dim, "use_linear": linear}
            return self._TRANSFORMER(width, heads, size, depth, **settings)

        def res(before, after, **sampled):
            settings = {"use_scale_shift_norm": use_scale_shift_norm, **sampled}
            return self._RES(before, emb, 0.0, after, **settings)

        down = res(channels, channels, down=True) if resblock_updown else self._DOWN(channels, True)
        up = res(wide, wide, up=True) if resblock_updown else self._UP(wide, True)

        self.input_blocks = nn.ModuleList(
            [
                one(nn.Conv2d(in_channels, channels, 3, padding=1)),
                one(res(channels, channels), attended()),
                one(down),
                one(res(channels, wide)),
            ]
        )
        middle = [res(wide, wide)]
        if depth_middle:
            middle += [attended(wide, depth_middle), res(wide, wide)]
        self.middle_block = one(*middle)
        self.output_blocks = nn.ModuleList(
            [
                one(res(2 * wide, wide)),
                one(res(wide + channels, wide), up),
                one(res(wide + channels, channels), attended()),
                one(res(2 * channels, channels), attended()),
            ]
        )
        last = nn.Conv2d(channels, 4, 3, padding=1)
        self.out = nn.Sequential(GroupNorm32(8, channels), nn.SiLU(), last)

    def forward(self, x, timesteps=None, context=None, y=None, **kwargs):
        times = timestep_embedding(timesteps, self.model_channels)
        emb = self.time_embed(times.to(x.dtype))
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
