"""Double of ldm/modules/attention.py: CrossAttention, its block, and what has them.

The surface was read in Stability-AI/stablediffusion cf1d67a.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ldm.util import default


class GEGLU(nn.Module):
    def __init__(self, dim_in, dim_out):
        super().__init__()
        self.proj = nn.Linear(dim_in, dim_out * 2)

    def forward(self, x):
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * F.gelu(gate)


class FeedForward(nn.Module):
    def __init__(self, dim, dim_out=None, mult=4, glu=False, dropout=0.0):
        super().__init__()
        inner_dim = int(dim * mult)
        dim_out = default(dim_out, dim)
        project_in = nn.Sequential(nn.Linear(dim, inner_dim), nn.GELU())
        if glu:
            project_in = GEGLU(dim, inner_dim)
        self.net = nn.Sequential(project_in, nn.Dropout(dropout), nn.Linear(inner_dim, dim_out))

    def forward(self, x):
        return self.net(x)


class CrossAttention(nn.Module):
    def __init__(self, query_dim, context_dim=None, heads=8, dim_head=64, dropout=0.0):
        super().__init__()
        inner_dim = dim_head * heads
        context_dim = default(context_dim, query_dim)
        self.scale = dim_head**-0.5
        self.heads = heads
        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_k = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_v = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, query_dim), nn.Dropout(dropout))

    def forward(self, x, context=None, mask=None):
        context = default(context, x)
        q, k, v = (
            layer(source).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, source in ((self.to_q, x), (self.to_k, context), (self.to_v, context))
        )
        scores = q.float() @ k.float().transpose(-1, -2) * self.scale
        if mask is not None:
            keep = mask.reshape(mask.shape[0], 1, 1, -1)
            scores = scores.masked_fill(~keep, -torch.finfo(scores.dtype).max)
        out = scores.softmax(-1).to(v.dtype) @ v
        return self.to_out(out.transpose(1, 2).flatten(2))


class MemoryEfficientCrossAttention(CrossAttention):
    """The real one needs xformers; the WebUI replaces the name by CrossAttention."""


class BasicTransformerBlock(nn.Module):
    ATTENTION_MODES = {
        "softmax": CrossAttention,
        "softmax-xformers": MemoryEfficientCrossAttention,
    }

    def __init__(
        self,
        dim,
        n_heads,
        d_head,
        dropout=0.0,
        context_dim=None,
        gated_ff=True,
        checkpoint=True,
        disable_self_attn=False,
    ):
        super().__init__()
        attention = self.ATTENTION_MODES["softmax"]
        self.attn1 = attention(query_dim=dim, heads=n_heads, dim_head=d_head)
        self.attn2 = attention(
            query_dim=dim, context_dim=context_dim, heads=n_heads, dim_head=d_head
        )
        self.ff = FeedForward(dim, dropout=dropout, glu=gated_ff)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))
        self.disable_self_attn = disable_self_attn

    def forward(self, x, context=None):
        return self._forward(x, context)

    def _forward(self, x, context=None):
        x = self.attn1(self.norm1(x), context=None) + x
        x = self.attn2(self.norm2(x), context=context) + x
        return self.ff(self.norm3(x)) + x


class SpatialTransformer(nn.Module):
    _BLOCK = BasicTransformerBlock

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
        self.in_channels = in_channels
        inner_dim = n_heads * d_head
        self.norm = nn.GroupNorm(8, in_channels, eps=1e-6)
        self.proj_in = nn.Conv2d(in_channels, inner_dim, 1)
        self.transformer_blocks = nn.ModuleList(
            [self._BLOCK(inner_dim, n_heads, d_head, context_dim=context_dim) for _ in range(depth)]
        )
        self.proj_out = nn.Conv2d(inner_dim, in_channels, 1)
        if use_linear:
            self.proj_in = nn.Linear(in_channels, inner_dim)
            self.proj_out = nn.Linear(inner_dim, in_channels)
        self.use_linear = use_linear

    def forward(self, x, context=None):
        h, (height, width) = self.norm(x), x.shape[2:]
        h = h if self.use_linear else self.proj_in(h)
        h = h.flatten(2).transpose(1, 2).contiguous()
        h = self.proj_in(h) if self.use_linear else h
        for block in self.transformer_blocks:
            h = block(h, context=context)
        h = self.proj_out(h) if self.use_linear else h
        h = h.transpose(1, 2).unflatten(2, (height, width)).contiguous()
        return (h if self.use_linear else self.proj_out(h)) + x
