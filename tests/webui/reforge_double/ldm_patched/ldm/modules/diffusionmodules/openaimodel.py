"""Double of ldm_patched/ldm/modules/diffusionmodules/openaimodel.py: a UNet of two levels.

The surface was read in Panchovix/stable-diffusion-webui-reForge 3b56b268. What the blocks compute
is in tests/webui/forge/unet_bodies.py.
"""

from functools import partial

import torch as th
from torch import nn
from unet_bodies import Downsampling, Model, Residual, Upsampling

from ldm_patched.ldm.modules.attention import SpatialTransformer
from ldm_patched.modules.ops import disable_weight_init as ops


class TimestepBlock(nn.Module):
    pass


class TimestepEmbedSequential(nn.Sequential, TimestepBlock):
    def forward(self, *args, **kwargs):
        return forward_timestep_embed(self, *args, **kwargs)


def forward_timestep_embed(
    ts,
    x,
    emb,
    context=None,
    transformer_options={},  # noqa: B006 - as there
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


class Upsample(Upsampling, nn.Module):
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
        self.conv = operations.Conv2d(channels, out_channels or channels, 3, padding=padding)


class Downsample(Downsampling, nn.Module):
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
        self.op = operations.Conv2d(channels, out_channels or channels, 3, 2, padding)


class ResBlock(Residual, TimestepBlock):
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
        self.updown, self.use_scale_shift_norm = up or down, use_scale_shift_norm
        self.skip_t_emb, self.exchange_temb_dims = skip_t_emb, exchange_temb_dims
        self._layers(operations, channels, emb_channels, out_channels or channels)

    def forward(self, x, emb):
        return self._forward(x, emb)


class UNetModel(Model, nn.Module):
    def __init__(
        self,
        image_size,
        in_channels,
        model_channels,
        out_channels,
        num_res_blocks,
        dropout=0,
        channel_mult=(1, 2, 4, 8),
        conv_resample=True,
        dims=2,
        num_classes=None,
        use_checkpoint=False,
        dtype=th.float32,
        num_heads=-1,
        num_head_channels=-1,
        num_heads_upsample=-1,
        use_scale_shift_norm=False,
        resblock_updown=False,
        use_new_attention_order=False,
        use_spatial_transformer=False,
        transformer_depth=1,
        context_dim=None,
        n_embed=None,
        legacy=True,
        disable_self_attentions=None,
        num_attention_blocks=None,
        disable_middle_self_attn=False,
        use_linear_in_transformer=False,
        adm_in_channels=None,
        transformer_depth_middle=None,
        transformer_depth_output=None,
        use_temporal_resblock=False,
        use_temporal_attention=False,
        time_context_dim=None,
        extra_ff_mix_layer=False,
        use_spatial_context=False,
        merge_strategy=None,
        merge_factor=0.0,
        video_kernel_size=None,
        disable_temporal_crossattention=False,
        max_ddpm_temb_period=10000,
        attn_precision=None,
        device=None,
        operations=ops,
    ):
        super().__init__()
        self.model_channels, self.num_classes, self.dtype = model_channels, num_classes, dtype
        size, linear = model_channels // num_heads, use_linear_in_transformer

        def attention(channels):
            return SpatialTransformer(
                channels,
                num_heads,
                size * channels // model_channels,
                context_dim=context_dim,
                use_linear=linear,
                operations=operations,
            )

        blocks = [partial(kind, operations=operations) for kind in (ResBlock, Downsample, Upsample)]
        self._build(operations, TimestepEmbedSequential, attention, *blocks)

    def forward(
        self,
        x,
        timesteps=None,
        context=None,
        y=None,
        control=None,
        transformer_options={},  # noqa: B006 - as there
        **kwargs,
    ):
        return self._step(x, timesteps, context, control, transformer_options)
