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
from lib_rocm_sd.engine.memory import version_of
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.graphs.programs import Graphs
from lib_rocm_sd.ops.linear.problem import MOST_WEIGHTS
from lib_rocm_sd.unet import compute
from lib_rocm_sd.unet.parts import Timed
from lib_rocm_sd.unet.weights import fact, laid, slots_of

_Facts = tuple[Any, ...]


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

    def step_begins(self) -> None:
        """What was made of an embedding is not looked at again."""
        self._step = None

    def _alone(self, active: torch.Tensor, timed: Timed) -> torch.Tensor:
        made = compute.linear(begin(self._session, Routes()), "alone", active, timed.layer)
        return made + _bias(timed).to(made.device, torch.float32)

    def _made(self, emb: torch.Tensor) -> dict[Timed, tuple[_Facts, torch.Tensor]]:
        """What all blocks add for a new embedding; empty where that cannot be."""
        timed = [each for each in self.timed if self._fits(each, emb)]
        layers = [each.layer for each in timed]
        if len(layers) < 2 or self._ready(layers):
            return {}
        facts = [self._facts(each) for each in timed]
        biases = [_bias(each) for each in timed]
        shaped = (emb.shape, emb.stride(), emb.dtype, emb.device)
        read = laid(slots_of(layers)), tuple(bias.data_ptr() for bias in biases)
        calls = begin(self._session, self._places.of((shaped, read)), self._graphs)
        run = partial(_joint, layers, biases)
        joint = calls.recorded(run, {"embedding": emb}, tuple(layers))
        parts = joint.split([layer.out_features for layer in layers], -1)
        return dict(zip(timed, zip(facts, parts, strict=True), strict=True))

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
        if bias is not None and version_of(bias) is None and not self._told:
            return False
        same = weight.device == emb.device and weight.dtype == emb.dtype
        same = same and (bias is None or (bias.device, bias.dtype) == (emb.device, emb.dtype))
        return same and weight.shape[1] == emb.shape[-1]


def _joint(
    layers: Sequence[nn.Linear],
    biases: list[torch.Tensor],
    calls: Calls,
    embedding: torch.Tensor,
) -> torch.Tensor:
    """What `layers` make of SiLU of `embedding`, side by side, as many as can be by one launch;
    and `biases`, read each time.
    """
    active, parts = nn.functional.silu(embedding), []
    for first in range(0, len(layers), MOST_WEIGHTS):
        some = layers[first : first + MOST_WEIGHTS]
        parts.append(compute.linear(calls, str(first), active, *some))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)) + torch.cat(biases).float()


def _bias(timed: Timed) -> torch.Tensor:
    """The convolution's: the parameter itself, or zeros."""
    bias = timed.conv._parameters.get("bias")
    if bias is None:
        weight: Any = timed.layer._parameters["weight"]
        return weight.new_zeros(timed.conv.out_channels)
    return bias.detach()
