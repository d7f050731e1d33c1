"""The time embedding, as every residual block of a step wants it: all of them by few launches.

What a block adds to its first convolution is a layer of the embedding, and that convolution's bias.
Both are added here, for all blocks at once. They are used only if neither the layer nor the bias
nor the embedding has changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.calls import Calls, Places, Routes, begin
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.graphs.programs import Graphs
from lib_rocm_sd.ops.linear.kernel import MOST_WEIGHTS
from lib_rocm_sd.unet import compute
from lib_rocm_sd.unet.parts import Timed
from lib_rocm_sd.unet.weights import fact, laid, slots_of, version_of

_Facts = tuple[Any, ...]


class _Biases:
    """Those of convolutions, side by side, as float32: equal only to itself."""

    def __init__(self, timed: Sequence[Timed], facts: Sequence[_Facts]) -> None:
        self._of = tuple(timed), tuple(facts)
        self.values = torch.cat([_bias(each) for each in timed])

    def are_of(self, timed: Sequence[Timed], facts: Sequence[_Facts]) -> bool:
        """Whether these are they, unchanged."""
        return self._of == (tuple(timed), tuple(facts))


@dataclass(frozen=True)
class _Step:
    """What was made of an embedding, that had this version: by block, with the facts of then."""

    emb: torch.Tensor
    version: int | None
    made: dict[Timed, tuple[_Facts, torch.Tensor]]


class Embeddings:
    """`timed`: of the residual blocks that apply SiLU to the embedding.

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
        self.timed: tuple[Timed, ...] = ()
        self._step: _Step | None = None
        self._biases: _Biases | None = None
        self._alone_with: dict[Timed, tuple[_Facts, torch.Tensor]] = {}

    def of(self, emb: torch.Tensor, timed: Timed, silu: bool) -> torch.Tensor:
        """(N, Co) in float32 of emb (N, E), the convolution's bias added: the layer of it, after
        SiLU if wanted. Rows may be strided.
        """
        if not silu:
            return self._alone(emb, timed)
        if emb.is_inference() and not self._told:
            return self._alone(nn.functional.silu(emb), timed)
        step = self._step
        if step is None or emb is not step.emb or version_of(emb) != step.version:
            step = self._step = None  # what is held is not written to
            step = self._step = _Step(emb, version_of(emb), self._made(emb))
        known = step.made.get(timed)
        if known is not None and known[0] == self._facts(timed):
            return known[1]
        return self._alone(nn.functional.silu(emb), timed)

    def forget(self) -> None:
        self.step_begins()
        self._places.forget()
        self._biases = None
        self._alone_with = {}

    def step_begins(self) -> None:
        """What was made of an embedding is not looked at again."""
        self._step = None

    def _alone(self, active: torch.Tensor, timed: Timed) -> torch.Tensor:
        made = compute.linear(begin(self._session, Routes()), "alone", active, timed.layer)
        fact_now = self._bias_fact(timed)
        known = self._alone_with.get(timed)
        if known is None or known[0] != fact_now:
            known = self._alone_with[timed] = fact_now, _bias(timed)
        return made + known[1]

    def _made(self, emb: torch.Tensor) -> dict[Timed, tuple[_Facts, torch.Tensor]]:
        """Of a new embedding, for all blocks; empty where that cannot be."""
        timed = [each for each in self.timed if self._fits(each, emb)]
        layers = [each.layer for each in timed]
        if len(layers) < 2 or self._ready(layers):
            return {}
        facts = [self._facts(each) for each in timed]
        biases = self._biases_of(timed, [bias for _, _, bias in facts])
        shaped = (emb.shape, emb.stride(), emb.dtype, emb.device)
        routes = self._places.of((shaped, laid(slots_of(layers))))
        calls = begin(self._session, routes, self._graphs)
        run = partial(_joint, layers, biases)
        joint = calls.recorded(run, {"embedding": emb}, (*layers, biases))
        parts = joint.split([layer.out_features for layer in layers], -1)
        return dict(zip(timed, zip(facts, parts, strict=True), strict=True))

    def _biases_of(self, timed: Sequence[Timed], facts: Sequence[_Facts]) -> _Biases:
        """The same object as long as none has changed, as their `facts` say."""
        if self._biases is None or not self._biases.are_of(timed, facts):
            self._biases = _Biases(timed, facts)
        return self._biases

    def _bias_fact(self, timed: Timed) -> _Facts:
        return fact(timed.conv._parameters.get("bias"), self._told)

    def _facts(self, timed: Timed) -> _Facts:
        own, told = timed.layer._parameters, self._told
        return fact(own.get("weight"), told), fact(own.get("bias"), told), self._bias_fact(timed)

    def _fits(self, timed: Timed, emb: torch.Tensor) -> bool:
        """False for a layer that is not where the embedding is, as while models are moved in parts,
        and for a bias that may change unnoticed.
        """
        weight: Any = timed.layer._parameters["weight"]
        bias = timed.conv._parameters.get("bias")
        if bias is not None and bias.is_inference() and not self._told:
            return False
        same = weight.device == emb.device and weight.dtype == emb.dtype
        return same and weight.shape[1] == emb.shape[-1]


def _joint(
    layers: Sequence[nn.Linear], biases: _Biases, calls: Calls, embedding: torch.Tensor
) -> torch.Tensor:
    """What `layers` make of SiLU of `embedding`, side by side, as many as can be by one launch;
    and `biases`.
    """
    active, parts = nn.functional.silu(embedding), []
    for first in range(0, len(layers), MOST_WEIGHTS):
        some = layers[first : first + MOST_WEIGHTS]
        parts.append(compute.linear(calls, str(first), active, *some))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)) + biases.values


def _bias(timed: Timed) -> torch.Tensor:
    """Of the convolution, in float32 and where the layer is."""
    weight: Any = timed.layer._parameters["weight"]
    bias = timed.conv._parameters.get("bias")
    if bias is None:
        return weight.new_zeros(timed.conv.out_channels, dtype=torch.float32)
    return bias.detach().to(weight.device, torch.float32)
