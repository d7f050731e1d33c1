"""Double of sgm/modules/attention.py: CrossAttention with the arguments for video.

The surface was read in Stability-AI/generative-models 45c443b.
Its forward goes through torch's SDPA; the block passes only x and context, as for images there.
"""

import torch
import torch.nn.functional as F
from ldm.modules.attention import BasicTransformerBlock as LdmBlock
from ldm.modules.attention import SpatialTransformer as LdmTransformer
from ldm.util import default
from torch import nn

SDP_IS_AVAILABLE = True
XFORMERS_IS_AVAILABLE = False


class CrossAttention(nn.Module):
    def __init__(
        self, query_dim, context_dim=None, heads=8, dim_head=64, dropout=0.0, backend=None
    ):
        super().__init__()
        inner_dim = dim_head * heads
        context_dim = default(context_dim, query_dim)
        self.scale = dim_head**-0.5
        self.heads = heads
        self.backend = backend
        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_k = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_v = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, query_dim), nn.Dropout(dropout))

    def forward(
        self,
        x,
        context=None,
        mask=None,
        additional_tokens=None,
        n_times_crossframe_attn_in_self=0,
    ):
        if additional_tokens is not None:
            x = torch.cat([additional_tokens, x], dim=1)
        context = default(context, x)
        q, k, v = (
            layer(source).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, source in ((self.to_q, x), (self.to_k, context), (self.to_v, context))
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        if additional_tokens is not None:
            out = out[:, additional_tokens.shape[1] :]
        return self.to_out(out)


class BasicTransformerBlock(LdmBlock):
    ATTENTION_MODES = {"softmax": CrossAttention, "softmax-xformers": CrossAttention}


class SpatialTransformer(LdmTransformer):
    _BLOCK = BasicTransformerBlock
