"""Double of comfy/ldm/pixart/pixartms.py (Comfy-Org/ComfyUI a125cd84): of few channels."""

import torch
from comfy.ldm.modules.diffusionmodules.mmdit import Mlp
from comfy.ldm.pixart.blocks import AttentionKVCompress, MultiHeadCrossAttention, t2i_modulate
from comfy.ops import disable_weight_init as ops
from torch import nn


class PixArtMSBlock(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        for name in ("norm1", "norm2"):
            self.add_module(name, ops.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6))
        self.attn = AttentionKVCompress(hidden_size, num_heads)
        self.cross_attn = MultiHeadCrossAttention(hidden_size, num_heads)
        self.mlp = Mlp(hidden_size, 4 * hidden_size)
        self.scale_shift_table = nn.Parameter(torch.randn(6, hidden_size) / 4)

    def forward(self, x, y, t, mask=None, HW=None, **kwargs):  # noqa: N803
        table = self.scale_shift_table[None].to(dtype=x.dtype, device=x.device)
        each = (table + t.reshape(len(x), 6, -1)).chunk(6, dim=1)
        x = x + each[2] * self.attn(t2i_modulate(self.norm1(x), *each[:2]), HW=HW)
        x = x + self.cross_attn(x, y, mask)
        return x + each[5] * self.mlp(t2i_modulate(self.norm2(x), *each[3:5]))


class PixArtMS(nn.Module):
    def __init__(self, width=48, heads=2, dtype=None):
        super().__init__()
        self.dtype = dtype
        self._img_in, self._proj_out = ops.Linear(4, width), ops.Linear(width, 4)
        self._txt_in, self._time_in = ops.Linear(48, width), ops.Linear(1, 6 * width)
        self.blocks = nn.ModuleList(PixArtMSBlock(width, heads) for _ in range(3))
        self.to(dtype)

    def forward(self, x, timesteps, context, c_size=None, c_ar=None, **kwargs):
        size, y = x.shape[2:], self._txt_in(context)
        t, y = self._time_in(timesteps[:, None].to(x.dtype) / 1000), y.view(1, -1, y.shape[2])
        x = self._img_in(x.flatten(2).transpose(1, 2))
        for block in self.blocks:
            x = block(x, y, t, None, tuple(size))
        return self._proj_out(x).transpose(1, 2).unflatten(2, size)
