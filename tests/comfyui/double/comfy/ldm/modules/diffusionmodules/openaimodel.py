"""Double of comfy/ldm/modules/diffusionmodules/openaimodel.py (Comfy-Org/ComfyUI a125cd84)."""

import torch
import torch.nn.functional as F
from comfy.ldm.modules.attention import SpatialTransformer
from comfy.ldm.modules.diffusionmodules.util import AlphaBlender
from comfy.ops import disable_weight_init as ops
from torch import nn


class TimestepBlock(nn.Module):
    pass


class Upsample(nn.Module):
    def __init__(
        self,
        channels,
        use_conv,
        dims=2,
        out_channels=None,
        padding=1,
        dtype=None,
        device=None,
        operations=ops,
    ):
        super().__init__()
        self.channels, self.use_conv, self.dims = channels, use_conv, dims
        self.conv = operations.conv_nd(
            dims, channels, channels, 3, padding=padding, dtype=dtype, device=device
        )

    def forward(self, x, output_shape=None):
        size = [2 * each for each in x.shape[2:]] if output_shape is None else output_shape[2:]
        return self.conv(F.interpolate(x, size=list(size), mode="nearest"))


class Downsample(nn.Module):
    def __init__(
        self,
        channels,
        use_conv,
        dims=2,
        out_channels=None,
        padding=1,
        dtype=None,
        device=None,
        operations=ops,
    ):
        super().__init__()
        self.channels, self.use_conv, self.dims = channels, use_conv, dims
        self.op = operations.conv_nd(
            dims, channels, channels, 3, stride=2, padding=padding, dtype=dtype, device=device
        )

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
        kernel_size=3,
        exchange_temb_dims=False,
        skip_t_emb=False,
        dtype=None,
        device=None,
        operations=ops,
    ):
        super().__init__()
        made, out = {"dtype": dtype, "device": device}, out_channels or channels

        def half(ci, *between):
            padding = [k // 2 for k in kernel_size] if isinstance(kernel_size, list) else 1
            conv = operations.conv_nd(dims, ci, out, kernel_size, padding=padding, **made)
            return nn.Sequential(operations.GroupNorm(8, ci, **made), nn.SiLU(), *between, conv)

        self.in_layers = half(channels)
        self.updown, self.use_scale_shift_norm = up or down, use_scale_shift_norm
        self.h_upd = self.x_upd = nn.Identity()
        self.skip_t_emb, self.exchange_temb_dims = skip_t_emb, exchange_temb_dims
        self.emb_layers = nn.Sequential(nn.SiLU(), operations.Linear(emb_channels, out, **made))
        self.out_layers = half(out, nn.Dropout(dropout))
        same = out == channels
        self.skip_connection = (
            nn.Identity() if same else operations.conv_nd(dims, channels, out, 1, **made)
        )

    def forward(self, x, emb):
        added = self.emb_layers(emb)[..., None, None]
        h = self.in_layers(x) + (added.movedim(1, 2) if self.exchange_temb_dims else added)
        return self.skip_connection(x) + self.out_layers(h)


class VideoResBlock(ResBlock):
    def __init__(
        self,
        channels,
        emb_channels,
        dropout,
        video_kernel_size=3,
        merge_strategy="fixed",
        merge_factor=0.5,
        out_channels=None,
        use_conv=False,
        use_scale_shift_norm=False,
        dims=2,
        use_checkpoint=False,
        up=False,
        down=False,
        dtype=None,
        device=None,
        operations=ops,
    ):
        made = {"dtype": dtype, "device": device, "operations": operations}
        super().__init__(channels, emb_channels, dropout, out_channels, dims=dims, **made)
        out = out_channels or channels
        over = {"dims": 3, "kernel_size": video_kernel_size, "exchange_temb_dims": True}
        self.time_stack = ResBlock(out, emb_channels, dropout, out, **over, **made)
        self.time_mixer = AlphaBlender(merge_factor, merge_strategy, "b t -> b 1 t 1 1")

    def forward(self, x, emb, num_video_frames, image_only_indicator=None):
        images = super().forward(x, emb).unflatten(0, (-1, num_video_frames)).transpose(1, 2)
        over = self.time_stack(images, emb.unflatten(0, (-1, num_video_frames)))
        made = self.time_mixer(images, over, image_only_indicator)
        return made.transpose(1, 2).flatten(0, 1)


def forward_timestep_embed(
    ts,
    x,
    emb,
    context=None,
    transformer_options={},  # noqa: B006
    output_shape=None,
    time_context=None,
    num_video_frames=None,
    image_only_indicator=None,
):
    for layer in ts:
        if isinstance(layer, TimestepBlock):
            x = layer(x, emb)
        elif isinstance(layer, SpatialTransformer):
            x = layer(x, context, transformer_options)
        elif isinstance(layer, Upsample):
            x = layer(x, output_shape=output_shape)
        else:
            x = layer(x)
    return x


class UNetModel(nn.Module):
    """Two levels, the first one with attention."""

    def __init__(self, channels=32, keys=48, linear=False, dtype=None, device=None, operations=ops):
        super().__init__()
        made = {"dtype": dtype, "device": device, "operations": operations}
        plain, wide, self.dtype = {"dtype": dtype, "device": device}, 2 * channels, dtype
        self.model_channels = channels

        def attention(width):
            return SpatialTransformer(width, 4, 8, 2, context_dim=keys, use_linear=linear, **made)

        def block(ci, co):
            return ResBlock(ci, wide, 0.0, co, **made)

        self.time_embed = nn.Sequential(operations.Linear(channels, wide, **plain), nn.SiLU())
        first = operations.conv_nd(2, 4, channels, 3, padding=1, **plain)
        down, up = Downsample(channels, True, **made), Upsample(wide, True, **made)
        self.input_blocks = nn.ModuleList(
            nn.ModuleList(layers)
            for layers in ([first], [block(channels, channels), attention(channels)], [down])
        )
        self.middle_block = nn.ModuleList([block(channels, wide)])
        self.output_blocks = nn.ModuleList(
            nn.ModuleList(layers)
            for layers in (
                [block(wide + channels, wide), up],
                [block(wide + channels, channels), attention(channels)],
                [block(wide, channels)],
            )
        )
        last = operations.conv_nd(2, channels, 4, 3, padding=1, **plain)
        self.out = nn.Sequential(operations.GroupNorm(8, channels, **plain), nn.SiLU(), last)

    def forward(
        self,
        x,
        timesteps=None,
        context=None,
        y=None,
        control=None,
        transformer_options={},  # noqa: B006
        **kwargs,
    ):
        waves = torch.arange(1, self.model_channels + 1, device=x.device)
        emb = self.time_embed((timesteps[:, None] / waves).cos().to(x.dtype))
        patches, h, hs = transformer_options.get("patches", {}), x, []
        for index, layers in enumerate(self.input_blocks):
            transformer_options["block"] = ("input", index)
            h = forward_timestep_embed(layers, h, emb, context, transformer_options)
            hs.append(h)
        transformer_options["block"] = ("middle", 0)
        h = forward_timestep_embed(self.middle_block, h, emb, context, transformer_options)
        for index, layers in enumerate(self.output_blocks):
            transformer_options["block"] = ("output", index)
            other = hs.pop()
            if control is not None:
                other += control[index]
            for patch in patches.get("output_block_patch", []):
                h, other = patch(h, other, transformer_options)
            h = torch.cat([h, other], 1)
            shape = hs[-1].shape if hs else None
            h = forward_timestep_embed(layers, h, emb, context, transformer_options, shape)
        return self.out(h)
