"""Double of modules/models/sd3/mmdit.py: a joint block, of few channels.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
"""

import torch
from modules.models.sd3.other_impls import Mlp, attention
from torch import nn


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class QkvLinear(torch.nn.Linear):
    pass


def split_qkv(qkv, head_dim):
    return qkv.unflatten(-1, (3, -1, head_dim)).unbind(2)


class SelfAttention(nn.Module):
    def __init__(self, dim, num_heads=8, qkv_bias=False, pre_only=False):
        super().__init__()
        self.num_heads, self.head_dim, self.pre_only = num_heads, dim // num_heads, pre_only
        self.qkv = QkvLinear(dim, dim * 3, bias=qkv_bias)
        if not pre_only:
            self.proj = nn.Linear(dim, dim)
        self.ln_q, self.ln_k = nn.Identity(), nn.Identity()

    def pre_attention(self, x):
        q, k, v = split_qkv(self.qkv(x), self.head_dim)
        return self.ln_q(q).flatten(2), self.ln_k(k).flatten(2), v

    def post_attention(self, x):
        return self.proj(x)

    def forward(self, x):
        q, k, v = self.pre_attention(x)
        return self.post_attention(attention(q, k, v, self.num_heads))


class DismantledBlock(nn.Module):
    def __init__(self, hidden_size, num_heads, mlp_ratio=4.0, qkv_bias=False, pre_only=False):
        super().__init__()
        self.pre_only, self.scale_mod_only = pre_only, False
        self.norm1 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = SelfAttention(hidden_size, num_heads, qkv_bias, pre_only)
        if not pre_only:
            self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
            gelu = nn.GELU(approximate="tanh")
            self.mlp = Mlp(hidden_size, int(hidden_size * mlp_ratio), act_layer=gelu)
        count = 2 if pre_only else 6
        self.adaLN_modulation = nn.Sequential(
            nn.SiLU(), nn.Linear(hidden_size, count * hidden_size)
        )

    def pre_attention(self, x, c):
        shift, scale, *rest = self.adaLN_modulation(c).chunk(2 if self.pre_only else 6, dim=1)
        qkv = self.attn.pre_attention(modulate(self.norm1(x), shift, scale))
        return qkv, None if self.pre_only else (x, *rest)

    def post_attention(self, attn, x, gate_msa, shift_mlp, scale_mlp, gate_mlp):
        x = x + gate_msa.unsqueeze(1) * self.attn.post_attention(attn)
        normed = modulate(self.norm2(x), shift_mlp, scale_mlp)
        return x + gate_mlp.unsqueeze(1) * self.mlp(normed)


def block_mixing(context, x, context_block, x_block, c):
    first, kept = context_block.pre_attention(context, c)
    second, of_x = x_block.pre_attention(x, c)
    qkv = [torch.cat(pair, dim=1) for pair in zip(first, second, strict=True)]
    attn = attention(*qkv, x_block.attn.num_heads)
    words = context.shape[1]
    after = None
    if not context_block.pre_only:
        after = context_block.post_attention(attn[:, :words], *kept)
    return after, x_block.post_attention(attn[:, words:], *of_x)


class JointBlock(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        pre_only = kwargs.pop("pre_only")
        self.context_block = DismantledBlock(*args, pre_only=pre_only, **kwargs)
        self.x_block = DismantledBlock(*args, pre_only=False, **kwargs)

    def forward(self, *args, **kwargs):
        return block_mixing(
            *args, context_block=self.context_block, x_block=self.x_block, **kwargs
        )
