"""Double of comfy/ldm/flux/layers.py (Comfy-Org/ComfyUI a125cd84): Flux's blocks."""

import torch
from comfy.ops import disable_weight_init as ops
from torch import nn

from .math import attention


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return nn.functional.rms_norm(x, self.scale.shape, self.scale.to(x), 1e-6)


class QKNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.query_norm, self.key_norm = RMSNorm(dim), RMSNorm(dim)

    def forward(self, q, k, v):
        return self.query_norm(q).to(v), self.key_norm(k).to(v)


class SelfAttention(nn.Module):
    def __init__(self, dim, num_heads=8):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = ops.Linear(dim, 3 * dim), ops.Linear(dim, dim)
        self.norm = QKNorm(dim // num_heads)


class Modulation(nn.Module):
    def __init__(self, dim, double):
        super().__init__()
        self.is_double, self.multiplier = double, 6 if double else 3
        self.lin = ops.Linear(dim, self.multiplier * dim)

    def forward(self, vec):
        return self.lin(nn.functional.silu(vec))[:, None].chunk(self.multiplier, dim=-1)


def _normed(norm, x, shift, scale):
    return torch.addcmul(shift, norm(x), 1 + scale)


def _heads(qkv, norm, count):
    q, k, v = qkv.unflatten(2, (3, count, -1)).permute(2, 0, 3, 1, 4)
    return *norm(q, k, v), v


def _mlp(dim, ratio):
    hidden = int(dim * ratio)
    return nn.Sequential(ops.Linear(dim, hidden), nn.GELU("tanh"), ops.Linear(hidden, dim))


def _finite(x):
    return torch.nan_to_num(x, nan=0.0) if x.dtype == torch.float16 else x


class DoubleStreamBlock(nn.Module):
    def __init__(self, hidden_size, num_heads, mlp_ratio, flipped_img_txt=False):
        super().__init__()
        self.num_heads, self.hidden_size = num_heads, hidden_size
        self.flipped_img_txt = flipped_img_txt
        for name in ("img", "txt"):
            self.add_module(f"{name}_mod", Modulation(hidden_size, double=True))
            self.add_module(f"{name}_attn", SelfAttention(hidden_size, num_heads))
            self.add_module(f"{name}_mlp", _mlp(hidden_size, mlp_ratio))
            for number in (1, 2):
                norm = ops.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
                self.add_module(f"{name}_norm{number}", norm)

    def forward(
        self,
        img,
        txt,
        vec,
        pe,
        attn_mask=None,
        modulation_dims_img=None,
        modulation_dims_txt=None,
        transformer_options={},  # noqa: B006
    ):
        of_img, of_txt = self.img_mod(vec), self.txt_mod(vec)
        first = self.img_attn.qkv(_normed(self.img_norm1, img, *of_img[:2]))
        second = self.txt_attn.qkv(_normed(self.txt_norm1, txt, *of_txt[:2]))
        heads = [
            _heads(second, self.txt_attn.norm, self.num_heads),
            _heads(first, self.img_attn.norm, self.num_heads),
        ]
        order = -1 if self.flipped_img_txt else 1
        joint = [torch.cat(pair, dim=2) for pair in zip(*heads[::order], strict=True)]
        made = attention(*joint, pe=pe, mask=attn_mask, transformer_options=transformer_options)
        sizes = [txt.shape[1], img.shape[1]][::order]
        of_words, of_tokens = made.split(sizes, 1)[::order]
        img = img + of_img[2] * self.img_attn.proj(of_tokens)
        img = img + of_img[5] * self.img_mlp(_normed(self.img_norm2, img, *of_img[3:5]))
        txt += of_txt[2] * self.txt_attn.proj(of_words)
        txt += of_txt[5] * self.txt_mlp(_normed(self.txt_norm2, txt, *of_txt[3:5]))
        return img, _finite(txt)


class SingleStreamBlock(nn.Module):
    def __init__(self, hidden_size, num_heads, mlp_ratio=4.0):
        super().__init__()
        self.num_heads, self.hidden_size = num_heads, hidden_size
        self.mlp_hidden_dim = int(hidden_size * mlp_ratio)
        self.linear1 = ops.Linear(hidden_size, 3 * hidden_size + self.mlp_hidden_dim)
        self.linear2 = ops.Linear(hidden_size + self.mlp_hidden_dim, hidden_size)
        self.norm = QKNorm(hidden_size // num_heads)
        self.pre_norm = ops.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.mlp_act = nn.GELU(approximate="tanh")
        self.modulation = Modulation(hidden_size, double=False)

    def forward(
        self,
        x,
        vec,
        pe,
        attn_mask=None,
        modulation_dims=None,
        transformer_options={},  # noqa: B006
    ):
        shift, scale, gate = self.modulation(vec)
        made = self.linear1(_normed(self.pre_norm, x, shift, scale))
        qkv, mlp = made.split([3 * self.hidden_size, self.mlp_hidden_dim], dim=-1)
        heads = _heads(qkv, self.norm, self.num_heads)
        attn = attention(*heads, pe=pe, mask=attn_mask, transformer_options=transformer_options)
        x += gate * self.linear2(torch.cat((attn, self.mlp_act(mlp)), 2))
        return _finite(x)
