"""Double of backend/nn/unet.py: the blocks of ldm's UNet, and a UNet of two levels of them.

The surface was read in lllyasviel/stable-diffusion-webui-forge dfdcbab6. What they compute
is in tests/webui/forge/unet_bodies.py.
"""

from torch import nn
from unet_bodies import (
    Attention,
    Block,
    Downsampling,
    Gated,
    Model,
    Net,
    Residual,
    Transformer,
    Upsampling,
)

from backend.attention import attention_function


def conv_nd(dims, *args, **kwargs):
    return nn.Conv2d(*args, **kwargs)


class TimestepBlock(nn.Module):
    pass


class TimestepEmbedSequential(nn.Sequential, TimestepBlock):
    def forward(self, x, emb, context=None, transformer_options={}, output_shape=None):  # noqa: B006
        modifiers = transformer_options.get("block_inner_modifiers", [])
        for index, layer in enumerate(self):
            for modifier in modifiers:
                x = modifier(x, "before", layer, index, self, transformer_options)
            if isinstance(layer, TimestepBlock):
                x = layer(x, emb, transformer_options)
            elif isinstance(layer, SpatialTransformer):
                x = layer(x, context, transformer_options)
            elif isinstance(layer, Upsample):
                x = layer(x, output_shape=output_shape)
            else:
                x = layer(x)
            for modifier in modifiers:
                x = modifier(x, "after", layer, index, self, transformer_options)
        return x


class GEGLU(Gated, nn.Module):
    def __init__(self, dim_in, dim_out):
        super().__init__()
        self.proj = nn.Linear(dim_in, dim_out * 2)


class FeedForward(Net, nn.Module):
    def __init__(self, dim, dim_out=None, mult=4, glu=False, dropout=0.0):
        super().__init__()
        last = nn.Linear(dim * mult, dim_out or dim)
        self.net = nn.Sequential(GEGLU(dim, dim * mult), nn.Dropout(dropout), last)


class CrossAttention(Attention, nn.Module):
    def __init__(self, query_dim, context_dim=None, heads=8, dim_head=64, dropout=0.0):
        super().__init__()
        self.heads, self.dim_head = heads, dim_head
        self._layers(nn, query_dim, context_dim or query_dim, heads * dim_head)

    def forward(self, x, context=None, value=None, mask=None, transformer_options={}):  # noqa: B006
        context = x if context is None else context
        v = self.to_v(context if value is None else value)
        return self.to_out(
            attention_function(self.to_q(x), self.to_k(context), v, self.heads, mask)
        )


class BasicTransformerBlock(Block, nn.Module):
    def __init__(
        self,
        dim,
        n_heads,
        d_head,
        dropout=0.0,
        context_dim=None,
        gated_ff=True,
        checkpoint=True,
        ff_in=False,
        inner_dim=None,
        disable_self_attn=False,
    ):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_head
        self.ff_in, self.is_res, self.disable_self_attn = False, True, disable_self_attn
        self.attn1 = CrossAttention(dim, None, n_heads, d_head)
        self.attn2 = CrossAttention(dim, context_dim, n_heads, d_head)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))
        self.ff = FeedForward(dim, glu=True)


class SpatialTransformer(Transformer, nn.Module):
    def __init__(
        self,
        in_channels,
        n_heads,
        d_head,
        depth=1,
        dropout=0.0,
        context_dim=None,
        disable_self_attn=False,
        use_linear=False,
        use_checkpoint=True,
    ):
        super().__init__()
        inner, self.use_linear = n_heads * d_head, use_linear
        self._ends(nn, in_channels, inner)
        self.transformer_blocks = nn.ModuleList(
            BasicTransformerBlock(inner, n_heads, d_head, context_dim=context_dim)
            for _ in range(depth)
        )


class Upsample(Upsampling, nn.Module):
    def __init__(self, channels, use_conv, dims=2, out_channels=None, padding=1):
        super().__init__()
        self.channels, self.use_conv, self.dims = channels, use_conv, dims
        self.conv = conv_nd(dims, channels, out_channels or channels, 3, padding=padding)


class Downsample(Downsampling, nn.Module):
    def __init__(self, channels, use_conv, dims=2, out_channels=None, padding=1):
        super().__init__()
        self.channels, self.use_conv, self.dims = channels, use_conv, dims
        self.op = conv_nd(dims, channels, out_channels or channels, 3, stride=2, padding=padding)


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
    ):
        super().__init__()
        self.updown, self.use_scale_shift_norm = up or down, use_scale_shift_norm
        self.skip_t_emb, self.exchange_temb_dims = skip_t_emb, exchange_temb_dims
        self._layers(nn, channels, emb_channels, out_channels or channels)

    def forward(self, x, emb, transformer_options={}):  # noqa: B006 - as there
        return self._forward(x, emb, transformer_options)


class IntegratedUNet2DConditionModel(Model, nn.Module):
    def __init__(
        self,
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
        num_heads=-1,
        num_head_channels=-1,
        use_scale_shift_norm=False,
        resblock_updown=False,
        use_spatial_transformer=False,
        transformer_depth=1,
        context_dim=None,
        disable_self_attentions=None,
        num_attention_blocks=None,
        disable_middle_self_attn=False,
        use_linear_in_transformer=False,
        adm_in_channels=None,
        transformer_depth_middle=None,
        transformer_depth_output=None,
    ):
        super().__init__()
        self.model_channels, self.num_classes = model_channels, num_classes
        width = model_channels // num_heads

        def attention(channels, heads=num_heads):
            size = width * channels // model_channels
            linear = use_linear_in_transformer
            return SpatialTransformer(
                channels, heads, size, context_dim=context_dim, use_linear=linear
            )

        self._build(nn, TimestepEmbedSequential, attention, ResBlock, Downsample, Upsample)

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
