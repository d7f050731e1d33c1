"""Double of ldm_patched/ldm/modules/attention.py, where SDPA was chosen.

The surface was read in Panchovix/stable-diffusion-webui-reForge 3b56b268.
"""

import torch
from torch import nn

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


class CrossAttention(nn.Module):
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
        context_dim = query_dim if context_dim is None else context_dim
        self.to_q = operations.Linear(query_dim, heads * dim_head, bias=False)
        self.to_k = operations.Linear(context_dim, heads * dim_head, bias=False)
        self.to_v = operations.Linear(context_dim, heads * dim_head, bias=False)
        self.to_out = nn.Sequential(
            operations.Linear(heads * dim_head, query_dim), nn.Dropout(dropout)
        )

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
