"""Double of comfy/ldm/wan/model.py (Comfy-Org/ComfyUI a125cd84): of few channels."""

import torch
from comfy.ldm.flux.math import rope
from comfy.ldm.modules.attention import optimized_attention
from comfy.ops import disable_weight_init as ops
from torch import nn


def _turned(x, freqs):
    return (freqs @ x.to(freqs.dtype).unflatten(-1, (-1, 2, 1))).flatten(-3).type_as(x)


class WanSelfAttention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        for key in ("q", "k", "v", "o"):
            self.add_module(key, ops.Linear(dim, dim))
        self.norm_q, self.norm_k = ops.RMSNorm(dim, eps=1e-6), ops.RMSNorm(dim, eps=1e-6)

    def forward(self, x, freqs, transformer_options={}):  # noqa: B006
        split = lambda rows: rows.unflatten(-1, (self.num_heads, -1))  # noqa: E731
        q, k = self.norm_q(self.q(x)), self.norm_k(self.k(x))
        q, k = (_turned(split(each), freqs).flatten(2) for each in (q, k))
        options = {"heads": self.num_heads, "transformer_options": transformer_options}
        return self.o(optimized_attention(q, k, self.v(x), **options))


class WanT2VCrossAttention(WanSelfAttention):
    def forward(self, x, context, transformer_options={}, **kwargs):  # noqa: B006
        q, k, v = self.norm_q(self.q(x)), self.norm_k(self.k(context)), self.v(context)
        options = {"heads": self.num_heads, "transformer_options": transformer_options}
        return self.o(optimized_attention(q, k, v, **options))


class WanAttentionBlock(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        for name in ("norm1", "norm2", "norm3"):
            norm = ops.LayerNorm(dim, eps=1e-6, elementwise_affine=name == "norm3")
            self.add_module(name, norm)
        self.self_attn = WanSelfAttention(dim, num_heads)
        self.cross_attn = WanT2VCrossAttention(dim, num_heads)
        layers = ops.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), ops.Linear(4 * dim, dim)
        self.ffn = nn.Sequential(*layers)
        self.modulation = nn.Parameter(torch.randn(1, 6, dim) / 4)

    def forward(self, x, e, freqs, context, context_img_len=257, transformer_options={}):  # noqa: B006
        each = (self.modulation.to(x).unsqueeze(0) + e).unbind(2)
        normed = torch.addcmul(each[0], self.norm1(x), 1 + each[1])
        x = torch.addcmul(x, self.self_attn(normed, freqs, transformer_options), each[2])
        options = {"context_img_len": context_img_len, "transformer_options": transformer_options}
        x = x + self.cross_attn(self.norm3(x), context, **options)
        y = self.ffn(torch.addcmul(each[3], self.norm2(x), 1 + each[4]))
        return torch.addcmul(x, y, each[5])


class WanModel(nn.Module):
    def __init__(self, width=48, heads=2, dtype=None):
        super().__init__()
        self.dtype, self._head_dim = dtype, width // heads
        self._img_in, self._proj_out = ops.Linear(4, width), ops.Linear(width, 4)
        self._txt_in, self._time_in = ops.Linear(48, width), ops.Linear(1, 6 * width)
        self.blocks = nn.ModuleList(WanAttentionBlock(width, heads) for _ in range(3))
        self.to(dtype)

    def forward(
        self,
        x,
        timestep,
        context,
        clip_fea=None,
        time_dim_concat=None,
        transformer_options={},  # noqa: B006
        **kwargs,
    ):
        size, words = x.shape[2:], self._txt_in(context)
        e = self._time_in(timestep[:, None].to(x.dtype) / 1000).unflatten(1, (1, 6, -1))
        x = self._img_in(x.flatten(2).transpose(1, 2))
        freqs = rope(torch.arange(x.shape[1])[None], self._head_dim, 100).unsqueeze(2)
        for block in self.blocks:
            options = {"freqs": freqs, "transformer_options": transformer_options}
            x = block(x, e=e, context=words, context_img_len=None, **options)
        return self._proj_out(x).transpose(1, 2).unflatten(2, size)
