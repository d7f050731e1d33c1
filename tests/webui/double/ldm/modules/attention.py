"""Double of ldm/modules/attention.py: CrossAttention and its block.

The surface was read in Stability-AI/stablediffusion cf1d67a.
"""

import torch
from torch import nn

from ldm.util import default


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
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))

    def forward(self, x, context=None):
        x = self.attn1(self.norm1(x), context=None) + x
        x = self.attn2(self.norm2(x), context=context) + x
        return self.ff(self.norm3(x)) + x
