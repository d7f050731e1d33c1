"""Double of backend/nn/flux.py: Flux, of few channels.

The surface was read in lllyasviel/stable-diffusion-webui-forge dfdcbab6.
"""

import torch
from torch import nn

from backend.attention import attention_function


def attention(q, k, v, pe):
    q, k = apply_rope(q, k, pe)
    return attention_function(q, k, v, q.shape[1], skip_reshape=True)


def rope(pos, dim, theta):
    angles = pos[..., None].float() / theta ** (torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2))


def apply_rope(xq, xk, freqs_cis):
    pairs = (each.float().unflatten(-1, (-1, 2, 1)) for each in (xq, xk))
    q, k = ((freqs_cis @ each).flatten(-3) for each in pairs)
    return q.type_as(xq), k.type_as(xk)


def fp16_fix(x):
    return x.clip(-32768.0, 32768.0) if x.dtype == torch.float16 else x


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = None
        self.scale, self.eps = nn.Parameter(torch.ones(dim)), 1e-6
        self.normalized_shape = [dim]

    def forward(self, x):
        return torch.rms_norm(x, self.normalized_shape, self.scale, self.eps)


class QKNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.query_norm, self.key_norm = RMSNorm(dim), RMSNorm(dim)

    def forward(self, q, k, v):
        return self.query_norm(q), self.key_norm(k)


class SelfAttention(nn.Module):
    def __init__(self, dim, num_heads=8, qkv_bias=False):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, dim * 3, bias=qkv_bias), nn.Linear(dim, dim)
        self.norm = QKNorm(dim // num_heads)


class Modulation(nn.Module):
    def __init__(self, dim, double):
        super().__init__()
        self.is_double, self.multiplier = double, 6 if double else 3
        self.lin = nn.Linear(dim, self.multiplier * dim)

    def forward(self, vec):
        return self.lin(nn.functional.silu(vec))[:, None].chunk(self.multiplier, dim=-1)


def _heads(qkv, norm, count):
    q, k, v = qkv.unflatten(2, (3, count, -1)).permute(2, 0, 3, 1, 4)
    return *norm(q, k, v), v


class DoubleStreamBlock(nn.Module):
    def __init__(self, hidden_size, num_heads, mlp_ratio, qkv_bias=False):
        super().__init__()
        self.num_heads, self.hidden_size = num_heads, hidden_size
        hidden = int(hidden_size * mlp_ratio)
        for name in ("img", "txt"):
            self.add_module(f"{name}_mod", Modulation(hidden_size, double=True))
            self.add_module(f"{name}_attn", SelfAttention(hidden_size, num_heads, qkv_bias))
            ends = nn.Linear(hidden_size, hidden), nn.Linear(hidden, hidden_size)
            mlp = nn.Sequential(ends[0], nn.GELU(approximate="tanh"), ends[1])
            self.add_module(f"{name}_mlp", mlp)
            for number in (1, 2):
                norm = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
                self.add_module(f"{name}_norm{number}", norm)

    def forward(self, img, txt, vec, pe):
        of_img, of_txt = self.img_mod(vec), self.txt_mod(vec)
        first = self.img_attn.qkv((1 + of_img[1]) * self.img_norm1(img) + of_img[0])
        second = self.txt_attn.qkv((1 + of_txt[1]) * self.txt_norm1(txt) + of_txt[0])
        heads = (
            _heads(second, self.txt_attn.norm, self.num_heads),
            _heads(first, self.img_attn.norm, self.num_heads),
        )
        made = attention(*(torch.cat(pair, dim=2) for pair in zip(*heads, strict=True)), pe=pe)
        words, tokens = made.split([txt.shape[1], img.shape[1]], 1)
        img = img + of_img[2] * self.img_attn.proj(tokens)
        txt = txt + of_txt[2] * self.txt_attn.proj(words)
        img = img + of_img[5] * self.img_mlp((1 + of_img[4]) * self.img_norm2(img) + of_img[3])
        txt = txt + of_txt[5] * self.txt_mlp((1 + of_txt[4]) * self.txt_norm2(txt) + of_txt[3])
        return img, fp16_fix(txt)


class SingleStreamBlock(nn.Module):
    def __init__(self, hidden_size, num_heads, mlp_ratio=4.0, qk_scale=None):
        super().__init__()
        self.num_heads, self.hidden_size = num_heads, hidden_size
        self.mlp_hidden_dim = int(hidden_size * mlp_ratio)
        self.linear1 = nn.Linear(hidden_size, 3 * hidden_size + self.mlp_hidden_dim)
        self.linear2 = nn.Linear(hidden_size + self.mlp_hidden_dim, hidden_size)
        self.norm = QKNorm(hidden_size // num_heads)
        self.pre_norm = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.mlp_act = nn.GELU(approximate="tanh")
        self.modulation = Modulation(hidden_size, double=False)

    def forward(self, x, vec, pe):
        shift, scale, gate = self.modulation(vec)
        made = self.linear1((1 + scale) * self.pre_norm(x) + shift)
        qkv, mlp = made.split([3 * self.hidden_size, self.mlp_hidden_dim], dim=-1)
        attn = attention(*_heads(qkv, self.norm, self.num_heads), pe=pe)
        return fp16_fix(x + gate * self.linear2(torch.cat((attn, self.mlp_act(mlp)), dim=2)))


class IntegratedFluxTransformer2DModel(nn.Module):
    def __init__(self, hidden_size, num_heads, context_in_dim):
        super().__init__()
        self._head_dim = hidden_size // num_heads
        self.img_in, self.txt_in = nn.Linear(4, hidden_size), nn.Linear(context_in_dim, hidden_size)
        self.time_in, self.final_layer = nn.Linear(1, hidden_size), nn.Linear(hidden_size, 4)
        self.double_blocks = nn.ModuleList(
            DoubleStreamBlock(hidden_size, num_heads, 4.0, True) for _ in range(2)
        )
        self.single_blocks = nn.ModuleList(
            SingleStreamBlock(hidden_size, num_heads) for _ in range(3)
        )

    def forward(self, x, timestep, context, y=None, guidance=None, **kwargs):
        size, txt = x.shape[2:], self.txt_in(context)
        vec = self.time_in(timestep[:, None].to(x.dtype) / 1000)
        img = self.img_in(x.flatten(2).transpose(1, 2))
        words = txt.shape[1]
        places = torch.arange(words + img.shape[1]).expand(len(x), -1)
        pe = rope(places, self._head_dim, 100)[:, None]
        for block in self.double_blocks:
            img, txt = block(img=img, txt=txt, vec=vec, pe=pe)
        img = torch.cat((txt, img), 1)
        for block in self.single_blocks:
            img = block(img, vec=vec, pe=pe)
        return self.final_layer(img[:, words:]).transpose(1, 2).unflatten(2, size)
