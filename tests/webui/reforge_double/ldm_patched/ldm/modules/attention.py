"""Double of ldm_patched/ldm/modules/attention.py, where SDPA was chosen.

The surface was read in Panchovix/stable-diffusion-webui-reForge 3b56b268. What the blocks compute
is in tests/webui/forge/unet_bodies.py.
"""

import torch
from torch import nn
from unet_bodies import Attention, Block, Gated, Net, Transformer

from ldm_patched.modules.ops import disable_weight_init as ops


def attention_basic(
    q,
    k,
    v,
    heads,
    mask=None,
    attn_precision=None,
    skip_reshape=False,
    skip_output_reshape=False,
):
    if not skip_reshape:
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    out = (scores if mask is None else scores + mask).softmax(-1) @ v
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def attention_pytorch(
    q,
    k,
    v,
    heads,
    mask=None,
    attn_precision=None,
    skip_reshape=False,
    skip_output_reshape=False,
):
    if not skip_reshape:
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


optimized_attention = attention_pytorch
optimized_attention_masked = optimized_attention


def optimized_attention_for_device(device, mask=False, small_input=False):
    if small_input:
        return attention_basic
    return optimized_attention_masked if mask else optimized_attention


class CrossAttention(Attention, nn.Module):
    def __init__(
        self,
        query_dim,
        context_dim=None,
        heads=8,
        dim_head=64,
        dropout=0.0,
        attn_precision=None,
        dtype=None,
        device=None,
        operations=ops,
    ):
        super().__init__()
        self.heads, self.dim_head, self.attn_precision = heads, dim_head, attn_precision
        self._layers(operations, query_dim, context_dim or query_dim, heads * dim_head)

    def forward(self, x, context=None, value=None, mask=None):
        context = x if context is None else context
        q, k = self.to_q(x), self.to_k(context)
        v = self.to_v(context if value is None else value)
        if mask is None:
            out = optimized_attention(q, k, v, self.heads, attn_precision=self.attn_precision)
        else:
            out = optimized_attention_masked(
                q, k, v, self.heads, mask, attn_precision=self.attn_precision
            )
        return self.to_out(out)


class GEGLU(Gated, nn.Module):
    def __init__(self, dim_in, dim_out, dtype=None, device=None, operations=ops):
        super().__init__()
        self.proj = operations.Linear(dim_in, dim_out * 2)


class FeedForward(Net, nn.Module):
    def __init__(
        self,
        dim,
        dim_out=None,
        mult=4,
        glu=False,
        dropout=0.0,
        dtype=None,
        device=None,
        operations=ops,
    ):
        super().__init__()
        gated, last = GEGLU(dim, dim * mult, operations=operations), dim_out or dim
        self.net = nn.Sequential(gated, nn.Dropout(dropout), operations.Linear(dim * mult, last))


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
        disable_temporal_crossattention=False,
        switch_temporal_ca_to_sa=False,
        attn_precision=None,
        dtype=None,
        device=None,
        operations=ops,
    ):
        super().__init__()
        self.n_heads, self.d_head, self.attn_precision = n_heads, d_head, attn_precision
        self.ff_in, self.is_res, self.disable_self_attn = False, True, disable_self_attn
        self.switch_temporal_ca_to_sa = switch_temporal_ca_to_sa
        self.attn1 = CrossAttention(dim, None, n_heads, d_head, operations=operations)
        self.ff = FeedForward(dim, glu=True, operations=operations)
        self.attn2 = CrossAttention(dim, context_dim, n_heads, d_head, operations=operations)
        self.norm2, self.norm1, self.norm3 = (operations.LayerNorm(dim) for _ in range(3))


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
        attn_precision=None,
        dtype=None,
        device=None,
        operations=ops,
    ):
        super().__init__()
        inner, self.use_linear = n_heads * d_head, use_linear
        self._ends(operations, in_channels, inner)
        self.transformer_blocks = nn.ModuleList(
            BasicTransformerBlock(
                inner, n_heads, d_head, context_dim=context_dim, operations=operations
            )
            for _ in range(depth)
        )
