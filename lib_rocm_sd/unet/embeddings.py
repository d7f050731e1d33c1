"""The time embedding, as every residual block of a step wants it: several of them by one launch.

A layer's values are used only if neither it nor the embedding has changed since they were made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.calls import Calls, Places, Routes, begin
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.graphs import Graphs
from lib_rocm_sd.ops.linear.kernel import MOST_WEIGHTS
from lib_rocm_sd.unet import compute
from lib_rocm_sd.unet.weights import fact, laid, slots_of, version_of

_Facts = tuple[Any, ...]


class Embeddings:
    """`layers`: the Linears that are given SiLU of the same embedding, each by its own block.

    `ready(layers)`: makes their weights those that are wanted, or says why ours must not read them.
    `told`: see Hook.tells.
    """

    def __init__(
        self,
        ready: Callable[[Sequence[nn.Module]], str],
        session: Session,
        graphs: Graphs,
        told: bool = False,
    ) -> None:
        self._ready, self._session, self._graphs = ready, session, graphs
        self._told = told
        self._places = Places()
        self.layers: tuple[nn.Linear, ...] = ()
        self._of: torch.Tensor | None = None
        self._version: int | None = 0
        self._active: torch.Tensor | None = None
        self._made: dict[nn.Linear, tuple[_Facts, torch.Tensor]] = {}

    def of(self, emb: torch.Tensor, layer: nn.Linear, silu: bool) -> torch.Tensor:
        """(N, Co) of emb (N, E): `layer` of it, after SiLU if wanted. Rows may be strided."""
        if not silu:
            return self._alone(emb, layer)
        if emb.is_inference() and not self._told:
            return self._alone(nn.functional.silu(emb), layer)
        if self._active is None or emb is not self._of or version_of(emb) != self._version:
            self._begin(emb)
        known = self._made.get(layer)
        if known is not None and known[0] == self._facts(layer):
            return known[1]
        assert self._active is not None
        return self._alone(self._active, layer)

    def forget(self) -> None:
        self.step_begins()
        self._places.forget()

    def step_begins(self) -> None:
        """What was made of an embedding is not looked at again."""
        self._of = self._active = None
        self._made = {}

    def _alone(self, active: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
        return compute.linear(begin(self._session, Routes()), "alone", active, layer)

    def _begin(self, emb: torch.Tensor) -> None:
        """A step begins with a new embedding."""
        self._made = {}
        active = self._active = nn.functional.silu(emb)
        self._of, self._version = emb, version_of(emb)
        layers = [layer for layer in self.layers if _fits(layer, emb)]
        if len(layers) < 2 or self._ready(layers):
            return
        facts = [self._facts(layer) for layer in layers]
        shaped = (emb.shape, emb.stride(), emb.dtype, emb.device)
        routes = self._places.of((*shaped, *laid(slots_of(layers))))
        calls = begin(self._session, routes, self._graphs)
        if calls.graphs_of(emb.device) is None:
            parts = _parts(layers, calls, active)
        else:
            joint = calls.recorded(partial(_joint, layers), {"embedding": emb}, tuple(layers))
            parts = [*joint.split([layer.out_features for layer in layers], -1)]
        self._made = dict(zip(layers, zip(facts, parts, strict=True), strict=True))

    def _facts(self, layer: nn.Linear) -> _Facts:
        own = layer._parameters
        return fact(own["weight"], self._told), fact(own.get("bias"), self._told)


def _parts(layers: Sequence[nn.Linear], calls: Calls, active: torch.Tensor) -> list[torch.Tensor]:
    """What each layer makes of `active`, some of them by one launch."""
    parts: list[torch.Tensor] = []
    for first in range(0, len(layers), MOST_WEIGHTS):
        some = layers[first : first + MOST_WEIGHTS]
        joint = compute.linear(calls, str(first), active, *some)
        parts += joint.split([layer.out_features for layer in some], -1)
    return parts


def _joint(layers: Sequence[nn.Linear], calls: Calls, embedding: torch.Tensor) -> torch.Tensor:
    """What `layers` make of SiLU of `embedding`, side by side."""
    return torch.cat(_parts(layers, calls, nn.functional.silu(embedding)), -1)


def _fits(layer: nn.Linear, emb: torch.Tensor) -> bool:
    """False for a layer that is not where the embedding is, as while models are moved in parts."""
    weight: Any = layer._parameters["weight"]
    same = weight.device == emb.device and weight.dtype == emb.dtype
    return same and weight.shape[1] == emb.shape[-1]
