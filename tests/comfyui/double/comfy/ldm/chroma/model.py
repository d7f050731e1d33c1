"""Double of comfy/ldm/chroma/model.py (Comfy-Org/ComfyUI a125cd84): Chroma, of few channels."""

import torch
from comfy.ldm.flux.math import rope
from comfy.ops import disable_weight_init as ops
from torch import nn

from .layers import ChromaModulationOut, DoubleStreamBlock, SingleStreamBlock


class Chroma(nn.Module):
    def __init__(self, width=48, heads=2, dtype=None):
        super().__init__()
        self.dtype = dtype
        self._img_in, self._out = ops.Linear(4, width), ops.Linear(width, 4)
        self._txt_in, self._head_dim = ops.Linear(48, width), width // heads
        self._distilled = ops.Linear(1, (2 * 12 + 3 * 3) * width)
        self.double_blocks = nn.ModuleList(DoubleStreamBlock(width, heads, 4.0) for _ in range(2))
        self.single_blocks = nn.ModuleList(SingleStreamBlock(width, heads) for _ in range(3))
        self.to(dtype)

    def forward(
        self,
        x,
        timestep,
        context,
        guidance=None,
        control=None,
        transformer_options={},  # noqa: B006
        **kwargs,
    ):
        size, txt = x.shape[2:], self._txt_in(context)
        img = self._img_in(x.flatten(2).transpose(1, 2))
        vectors = self._distilled(timestep[:, None].to(x.dtype) / 1000)
        vectors = vectors.unflatten(1, (-1, img.shape[2]))
        places = torch.arange(txt.shape[1] + img.shape[1]).expand(len(x), -1)
        pe = rope(places, self._head_dim, 100)[:, None]
        mask = kwargs.get("attention_mask")
        given = {"pe": pe, "attn_mask": mask, "transformer_options": transformer_options}
        at = lambda offset: ChromaModulationOut.from_offset(vectors, offset)  # noqa: E731
        for i, block in enumerate(self.double_blocks):
            vec = (at(9 + 6 * i), at(12 + 6 * i)), (at(21 + 6 * i), at(24 + 6 * i))
            img, txt = block(img=img, txt=txt, vec=vec, **given)
        words, img = txt.shape[1], torch.cat((txt, img), 1)
        for i, block in enumerate(self.single_blocks):
            img = block(img, vec=at(3 * i), **given)
        return self._out(img[:, words:]).transpose(1, 2).unflatten(2, size)
