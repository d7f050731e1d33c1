"""The WebUI's attention, called alone: its forwards, on a layer that projects nothing; or a Forge's
functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.hosts.webui import host
from lib_rocm_sd.lab.speed_job import Attention


class Method:
    """q (B, Sq, H, D), k and v (B, Sk, H, D) to (B, Sq, H*D), by the WebUI's forwards.

    A square image of one head goes through the VAE's AttnBlock, all else through the UNet's
    CrossAttention. `own` gives the WebUI's forward for a layer; None: what its class has now.
    """

    def __init__(
        self, cross: type, block: type, own: Callable[[nn.Module], host.Forward] | None
    ) -> None:
        self._cross = _layer(cross, ("to_q", "to_k", "to_v"))
        self._cross.to_out = nn.Sequential(nn.Identity(), nn.Identity())
        self._block = _layer(block, ("q", "k", "v"))
        self._block.norm = self._block.proj_out = nn.Identity()
        self._own = own
        self._zeros: dict[Any, torch.Tensor] = {}

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        side = math.isqrt(q.shape[1])
        if q.shape == k.shape and q.shape[2] == 1 and side * side == q.shape[1]:
            return self._through_block(q, k, v, side)
        layer, heads, head_dim = self._cross, *q.shape[2:]
        layer.heads, layer.dim_head, layer.scale = heads, head_dim, head_dim**-0.5
        layer.to_q.value, layer.to_k.value, layer.to_v.value = (t.flatten(2) for t in (q, k, v))
        try:
            with autocast():
                out: torch.Tensor = self._forward(layer)(layer, layer.to_q.value, layer.to_k.value)
        finally:
            layer.to_q.value = layer.to_k.value = layer.to_v.value = None
        return out

    def _through_block(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, side: int
    ) -> torch.Tensor:
        """What the layer adds to its input: nothing, here."""
        layer = self._block
        images = [t.flatten(2).transpose(1, 2).unflatten(2, (side, side)) for t in (q, k, v)]
        layer.q.value, layer.k.value, layer.v.value = images
        layer.in_channels = q.shape[3]
        try:
            out: torch.Tensor = self._forward(layer)(layer, self._zero(images[0]))
        finally:
            layer.q.value = layer.k.value = layer.v.value = None
        return out.flatten(2).transpose(1, 2)

    def _forward(self, layer: Any) -> Any:
        return type(layer).forward if self._own is None else self._own(layer)

    def _zero(self, like: torch.Tensor) -> torch.Tensor:
        key = (like.shape, like.dtype, like.device)
        if key not in self._zeros:
            self._zeros = {key: torch.zeros(like.shape, dtype=like.dtype, device=like.device)}
        return self._zeros[key]


class _Given(nn.Module):
    """Gives `value`, whatever it is called with."""

    value: torch.Tensor | None = None

    def forward(self, _: Any) -> Any:
        return self.value


def _layer(kind: type, projections: tuple[str, ...]) -> Any:
    """A layer of the WebUI's class without weights, for inference."""
    made: Any = object.__new__(kind)
    nn.Module.__init__(made)
    for name in projections:
        setattr(made, name, _Given())
    return made.eval()


def of_functions(packed: Any, spatial: Any) -> Attention:
    """q (B, Sq, H, D), k and v (B, Sk, H, D) to (B, Sq, H*D), by these functions of a Forge.

    A square image of one head goes through `spatial`, as in the VAE, where there is one.
    """

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        side = math.isqrt(q.shape[1])
        if spatial is not None and q.shape == k.shape and (q.shape[2], side**2) == (1, q.shape[1]):
            images = (t.flatten(2).transpose(1, 2).unflatten(2, (side, side)) for t in (q, k, v))
            # its functions look at memory as NCHW has it
            made = spatial(*(image.contiguous() for image in images))
            return made.flatten(2).transpose(1, 2)  # type: ignore[no-any-return]
        heads = q.shape[2]
        with torch.no_grad():
            out: torch.Tensor = packed(*(t.flatten(2) for t in (q, k, v)), heads)
        return out

    return attention


def autocast() -> AbstractContextManager[Any]:
    """As around the WebUI's UNet."""
    devices: Any = host.module("modules.devices")
    if devices is None or getattr(devices, "unet_needs_upcast", False):
        return nullcontext()
    context: AbstractContextManager[Any] = devices.autocast()
    return context
