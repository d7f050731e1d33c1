"""Double of comfy/ldm/pixart/blocks.py (Comfy-Org/ComfyUI a125cd84)."""

from comfy.ldm.modules.attention import optimized_attention
from comfy.ops import disable_weight_init as ops
from torch import nn


def t2i_modulate(x, shift, scale):
    return x * (1 + scale) + shift


class MultiHeadCrossAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_linear, self.kv_linear = (
            ops.Linear(d_model, d_model),
            ops.Linear(d_model, 2 * d_model),
        )
        self.proj = ops.Linear(d_model, d_model)
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)

    def forward(self, x, cond, mask=None):
        k, v = self.kv_linear(cond).view(len(x), -1, 2 * x.shape[2]).chunk(2, 2)
        made = optimized_attention(self.q_linear(x), k, v, self.num_heads, mask=None)
        return self.proj_drop(self.proj(made))


class AttentionKVCompress(nn.Module):
    def __init__(self, dim, num_heads=8):
        super().__init__()
        self.num_heads, self.sr_ratio = num_heads, 1
        self.qkv, self.proj = ops.Linear(dim, 3 * dim), ops.Linear(dim, dim)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def forward(self, x, mask=None, HW=None, block_id=None):  # noqa: N803
        q, k, v = self.qkv(x).chunk(3, 2)
        q, k = self.q_norm(q), self.k_norm(k)
        return self.proj(optimized_attention(q, k, v, self.num_heads, mask=None))
