"""Double of comfy/ldm/flux/math.py (Comfy-Org/ComfyUI a125cd84)."""

import torch
from comfy.ldm.modules.attention import optimized_attention


def attention(q, k, v, pe, mask=None, transformer_options={}):  # noqa: B006
    if pe is not None:
        q, k = (_turned(each, pe) for each in (q, k))
    options = {"mask": mask, "transformer_options": transformer_options}
    return optimized_attention(q, k, v, q.shape[1], skip_reshape=True, **options)


def _turned(x, pe):
    return (pe @ x.to(pe.dtype).unflatten(-1, (-1, 2, 1))).flatten(-3).type_as(x)


def rope(pos, dim, theta):
    angles = pos[..., None].float() / theta ** (torch.arange(0, dim, 2).to(pos.device) / dim)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2))
