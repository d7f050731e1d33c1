"""Double of comfy/ldm/modules/attention.py (Comfy-Org/ComfyUI a125cd84): calls of overrides."""

import functools

import torch.nn.functional as F
from comfy.ops import disable_weight_init as ops
from torch import nn


def wrap_attn(func):
    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        if "_inside_attn_wrapper" in kwargs:
            return func(*args, **kwargs)
        kwargs["_inside_attn_wrapper"] = True
        override = (kwargs.get("transformer_options") or {}).get("optimized_attention_override")
        return func(*args, **kwargs) if override is None else override(func, *args, **kwargs)

    return wrapper


@wrap_attn
def attention_pytorch(
    q,
    k,
    v,
    heads,
    mask=None,
    attn_precision=None,
    skip_reshape=False,
    skip_output_reshape=False,
    **kwargs,
):
    if not skip_reshape:
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    if mask is not None:
        mask = mask[None] if mask.ndim == 2 else mask
        mask = mask[:, None] if mask.ndim == 3 else mask
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


optimized_attention = attention_pytorch


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
        self.heads, self.attn_precision = heads, attn_precision
        width, other = heads * dim_head, context_dim or query_dim
        self.to_q = operations.Linear(query_dim, width, bias=False)
        self.to_k = operations.Linear(other, width, bias=False)
        self.to_v = operations.Linear(other, width, bias=False)
        self.to_out = nn.Sequential(operations.Linear(width, query_dim), nn.Dropout(dropout))

    def forward(self, x, context=None, value=None, mask=None, transformer_options={}):  # noqa: B006
        context = x if context is None else context
        q, k = self.to_q(x), self.to_k(context)
        v = self.to_v(context if value is None else value)
        options = {
            "attn_precision": self.attn_precision,
            "transformer_options": transformer_options,
        }
        if mask is not None:
            options["mask"] = mask
        return self.to_out(optimized_attention(q, k, v, self.heads, **options))
