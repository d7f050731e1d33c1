"""Double of modules/models/sd3/mmdit.py: the attention of a joint block, of few channels.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
"""

from modules.models.sd3.other_impls import attention
from torch import nn


def split_qkv(qkv, head_dim):
    return qkv.unflatten(-1, (3, -1, head_dim)).unbind(2)


class SelfAttention(nn.Module):
    def __init__(self, dim, num_heads=8, qkv_bias=False):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def pre_attention(self, x):
        q, k, v = split_qkv(self.qkv(x), self.head_dim)
        return q.flatten(2), k.flatten(2), v

    def post_attention(self, x):
        return self.proj(x)

    def forward(self, x):
        q, k, v = self.pre_attention(x)
        return self.post_attention(attention(q, k, v, self.num_heads))
