"""Double of comfy/ldm/flux/model.py (Comfy-Org/ComfyUI a125cd84): Flux, of few channels."""

import torch
from comfy.ops import disable_weight_init as ops
from torch import nn

from .layers import DoubleStreamBlock, SingleStreamBlock
from .math import rope


class Flux(nn.Module):
    def __init__(self, width=48, heads=2, flipped=False, dtype=None):
        super().__init__()
        self.dtype = dtype
        self._img_in, self._out = ops.Linear(4, width), ops.Linear(width, 4)
        self._txt_in, self._time_in = ops.Linear(48, width), ops.Linear(1, width)
        self._head_dim = width // heads
        self.double_blocks = nn.ModuleList(
            DoubleStreamBlock(width, heads, 4.0, flipped) for _ in range(2)
        )
        self.single_blocks = nn.ModuleList(SingleStreamBlock(width, heads) for _ in range(3))
        self.to(dtype)

    def forward(
        self,
        x,
        timestep,
        context,
        y=None,
        guidance=None,
        ref_latents=None,
        control=None,
        transformer_options={},  # noqa: B006
        **kwargs,
    ):
        size, txt = x.shape[2:], self._txt_in(context)
        vec = self._time_in(timestep[:, None].to(x.dtype) / 1000)
        img = self._img_in(x.flatten(2).transpose(1, 2))
        places = torch.arange(txt.shape[1] + img.shape[1]).expand(len(x), -1)
        pe = rope(places, self._head_dim, 100)[:, None]
        mask = kwargs.get("attention_mask")
        given = {"attn_mask": mask, "transformer_options": transformer_options}
        for block in self.double_blocks:
            img, txt = block(img=img, txt=txt, vec=vec, pe=pe, **given)
        words, img = txt.shape[1], torch.cat((txt, img), 1)
        for block in self.single_blocks:
            img = block(img, vec=vec, pe=pe, **given)
        return self._out(img[:, words:]).transpose(1, 2).unflatten(2, size)
