"""Double of modules/hypernetworks/hypernetwork.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
Applying them, and the default attention forward.
"""

import torch
from ldm.util import default

from modules import devices, shared


class Hypernetwork:
    """Only what generation needs: two layers for each context width."""

    def __init__(self, name, width, seed):
        generator = torch.Generator().manual_seed(seed)
        self.name = name
        self.layers = {width: tuple(self._layer(width, generator) for _ in range(2))}

    @staticmethod
    def _layer(width, generator):
        layer = torch.nn.Linear(width, width)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        return layer


def apply_single_hypernetwork(hypernetwork, context_k, context_v, layer=None):
    layers = (hypernetwork.layers if hypernetwork is not None else {}).get(context_k.shape[2])
    if layers is None:
        return context_k, context_v
    if layer is not None:
        layer.hyper_k, layer.hyper_v = layers
    return tuple(
        devices.cond_cast_unet(one(devices.cond_cast_float(context)))
        for one, context in zip(layers, (context_k, context_v), strict=True)
    )


def apply_hypernetworks(hypernetworks, context, layer=None):
    context_k = context_v = context
    for hypernetwork in hypernetworks:
        context_k, context_v = apply_single_hypernetwork(hypernetwork, context_k, context_v, layer)
    return context_k, context_v


def attention_CrossAttention_forward(self, x, context=None, mask=None, **kwargs):  # noqa: N802
    q = self.to_q(x)
    context = default(context, x)
    context_k, context_v = apply_hypernetworks(shared.loaded_hypernetworks, context, self)
    k, v = self.to_k(context_k), self.to_v(context_v)
    q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) * self.scale
    if mask is not None:
        keep = mask.reshape(mask.shape[0], 1, 1, -1)
        scores = scores.masked_fill(~keep, -torch.finfo(scores.dtype).max)
    out = scores.softmax(dim=-1) @ v
    return self.to_out(out.transpose(1, 2).flatten(2))
