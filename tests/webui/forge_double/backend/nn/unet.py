"""Double of backend/nn/unet.py.

The surface was read in lllyasviel/stable-diffusion-webui-forge dfdcbab6.
"""

from torch import nn

from backend.attention import attention_function


class CrossAttention(nn.Module):
    def __init__(self, query_dim, context_dim=None, heads=8, dim_head=64, dropout=0.0):
        super().__init__()
        self.heads, self.dim_head = heads, dim_head
        context_dim = query_dim if context_dim is None else context_dim
        self.to_q = nn.Linear(query_dim, heads * dim_head, bias=False)
        self.to_k = nn.Linear(context_dim, heads * dim_head, bias=False)
        self.to_v = nn.Linear(context_dim, heads * dim_head, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, query_dim), nn.Dropout(dropout))

    def forward(self, x, context=None, value=None, mask=None, transformer_options={}):  # noqa: B006 - as there
        context = x if context is None else context
        q, k = self.to_q(x), self.to_k(context)
        v = self.to_v(context if value is None else value)
        return self.to_out(attention_function(q, k, v, self.heads, mask))
