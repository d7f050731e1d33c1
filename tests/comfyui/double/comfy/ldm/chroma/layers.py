"""Double of comfy/ldm/chroma/layers.py (Comfy-Org/ComfyUI a125cd84): Flux's blocks, which are given
what modulates them.
"""

from dataclasses import dataclass

import torch
from comfy.ldm.flux import layers
from comfy.ldm.flux.layers import _finite, _heads, _normed
from comfy.ldm.flux.math import attention


@dataclass
class ChromaModulationOut:
    shift: torch.Tensor
    scale: torch.Tensor
    gate: torch.Tensor

    @classmethod
    def from_offset(cls, tensor, offset=0):
        return cls(*tensor[:, offset : offset + 3].split(1, dim=1))


class DoubleStreamBlock(layers.DoubleStreamBlock):
    def __init__(self, hidden_size, num_heads, mlp_ratio):
        super().__init__(hidden_size, num_heads, mlp_ratio)
        del self.img_mod, self.txt_mod

    def forward(self, img, txt, pe, vec, attn_mask=None, transformer_options={}):  # noqa: B006
        (img1, img2), (txt1, txt2) = vec
        first = self.img_attn.qkv(_normed(self.img_norm1, img, img1.shift, img1.scale))
        second = self.txt_attn.qkv(_normed(self.txt_norm1, txt, txt1.shift, txt1.scale))
        heads = (
            _heads(second, self.txt_attn.norm, self.num_heads),
            _heads(first, self.img_attn.norm, self.num_heads),
        )
        joint = (torch.cat(pair, dim=2) for pair in zip(*heads, strict=True))
        made = attention(*joint, pe=pe, mask=attn_mask, transformer_options=transformer_options)
        words, tokens = made.split([txt.shape[1], img.shape[1]], 1)
        img.addcmul_(img1.gate, self.img_attn.proj(tokens))
        img.addcmul_(img2.gate, self.img_mlp(_normed(self.img_norm2, img, img2.shift, img2.scale)))
        txt.addcmul_(txt1.gate, self.txt_attn.proj(words))
        txt.addcmul_(txt2.gate, self.txt_mlp(_normed(self.txt_norm2, txt, txt2.shift, txt2.scale)))
        return img, _finite(txt)


class SingleStreamBlock(layers.SingleStreamBlock):
    def __init__(self, hidden_size, num_heads, mlp_ratio=4.0):
        super().__init__(hidden_size, num_heads, mlp_ratio)
        del self.modulation

    def forward(self, x, pe, vec, attn_mask=None, transformer_options={}):  # noqa: B006
        made = self.linear1(_normed(self.pre_norm, x, vec.shift, vec.scale))
        qkv, mlp = made.split([3 * self.hidden_size, self.mlp_hidden_dim], dim=-1)
        heads = _heads(qkv, self.norm, self.num_heads)
        attn = attention(*heads, pe=pe, mask=attn_mask, transformer_options=transformer_options)
        x.addcmul_(vec.gate, self.linear2(torch.cat((attn, self.mlp_act(mlp)), 2)))
        return _finite(x)
