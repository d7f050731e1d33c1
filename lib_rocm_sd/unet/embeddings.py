"""The time embedding, as every residual block of a step wants it: several of them by one launch.

A layer's values are used only if neither it nor the embedding has changed since they were made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.unet import compute
from lib_rocm_sd.unet.weights import fact

_Facts = tuple[Any, ...]


class Embeddings:
    """`layers`: the Linears that are given SiLU of the same embedding, each by its own block.

    `ready(layers)`: makes their weights those that are wanted, or says why ours must not read them.
    """

    def __init__(self, ready: Callable[[Sequence[nn.Module]], str], session: Session) -> None:
        self._ready, self._session = ready, session
        self.layers: tuple[nn.Linear, ...] = ()
        self._of: torch.Tensor | None = None
        self._version = 0
        self._active: torch.Tensor | None = None
        self._made: dict[nn.Linear, tuple[_Facts, torch.Tensor]] = {}

    def of(self, emb: torch.Tensor, layer: nn.Linear, silu: bool) -> torch.Tensor:
        """(N, Co) of emb (N, E): `layer` of it, after SiLU if wanted. Rows may be strided."""
        if not silu:
            return self._alone(emb, layer)
        if emb.is_inference():
            return self._alone(nn.functional.silu(emb), layer)
        if self._active is None or emb is not self._of or emb._version != self._version:
            self._begin(emb)
        known = self._made.get(layer)
        if known is not None and known[0] == _facts(layer):
            return known[1]
        assert self._active is not None
        return self._alone(self._active, layer)

    def forget(self) -> None:
        self._of = self._active = None
        self._made = {}

    def _alone(self, active: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
        own: Any = layer._parameters
        return compute.linear(active, own["weight"], own["bias"], session=self._session)

    def _begin(self, emb: torch.Tensor) -> None:
        """A step begins with a new embedding."""
        self._made = {}
        self._active = nn.functional.silu(emb)
        self._of, self._version = emb, emb._version
        layers = [layer for layer in self.layers if _fits(layer, emb)]
        if len(layers) < 2 or self._ready(layers):
            return
        for first in range(0, len(layers), compute.MOST_WEIGHTS):
            self._together(self._active, layers[first : first + compute.MOST_WEIGHTS])

    def _together(self, active: torch.Tensor, layers: Sequence[nn.Linear]) -> None:
        own: list[Any] = [layer._parameters for layer in layers]
        weights, biases = [item["weight"] for item in own], [item["bias"] for item in own]
        joint = compute.linear(active, weights, biases, session=self._session)
        parts = joint.split([weight.shape[0] for weight in weights], -1)
        for layer, part in zip(layers, parts, strict=True):
            self._made[layer] = (_facts(layer), part)


def _fits(layer: nn.Linear, emb: torch.Tensor) -> bool:
    """False for a layer that is not where the embedding is, as while models are moved in parts."""
    weight: Any = layer._parameters["weight"]
    same = weight.device == emb.device and weight.dtype == emb.dtype
    return same and weight.shape[1] == emb.shape[-1]


def _facts(layer: nn.Linear) -> _Facts:
    own = layer._parameters
    return fact(own["weight"]), fact(own["bias"])
