"""Keys and values of the prompt, as every transformer block of a step wants them: by one launch.

They hang on the prompt and on weights alone. A block by itself has some hundred rows for them, too
few to fill a card.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.calls import Calls, Places, begin
from lib_rocm_sd.catalog.unet import MOST_PROMPT_BYTES
from lib_rocm_sd.engine.memory import version_of
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.graphs.device import is_free, stream_of
from lib_rocm_sd.graphs.programs import Graphs
from lib_rocm_sd.ops.linear.problem import MOST_WEIGHTS
from lib_rocm_sd.unet import compute
from lib_rocm_sd.unet.parts import Attention
from lib_rocm_sd.unet.weights import fact, laid, slots_of

_Facts = tuple[Any, ...]


class Side:
    """Attentions whose keys and values lie side by side. Equal only to itself: what a graph has
    recorded reads the columns of one.
    """

    def __init__(self, parts: Sequence[Attention]) -> None:
        self.parts = tuple(parts)
        self.layers = [layer for part in parts for layer in (part.to_k, part.to_v)]
        self.columns: dict[Attention, tuple[int, int]] = {}
        """The first of each, and how many."""
        self.width = 0
        for part in parts:
            count = part.to_k.out_features + part.to_v.out_features
            self.columns[part] = self.width, count
            self.width += count


@dataclass(frozen=True)
class Ready:
    """Keys and values of many attentions: `rows` (N * tokens, side.width)."""

    rows: torch.Tensor
    side: Side


@dataclass(eq=False)
class _Step:
    """What was made of a prompt, that had this version, on a stream, with the facts of then.
    `left`: who has not asked for it yet.
    """

    context: torch.Tensor
    version: int | None
    stream: int
    ready: Ready | None = None
    facts: dict[Attention, _Facts] = field(default_factory=dict)
    left: set[Attention] = field(default_factory=set)

    def serves(self, context: torch.Tensor, part: Attention) -> bool:
        """Whether `part` may be given what was made. Who asks again is in another step, before
        which prompt and weights may have been written to unnoticed.
        """
        same = context is self.context and version_of(context) == self.version
        asks_again = part in self.facts and part not in self.left
        return same and not asks_again and self.stream == _stream(context)


class Prompts:
    """`parts`: of the cross-attentions that are ours.

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
        self.parts: tuple[Attention, ...] = ()
        self._side: Side | None = None
        self._step: _Step | None = None

    def of(self, context: torch.Tensor, part: Attention) -> Ready | None:
        """What holds the keys and values of `part` for context (N, tokens, E); None where it is to
        make them itself.
        """
        if len(self.parts) < 2 or (context.is_inference() and not self._told):
            return None
        if context.is_cuda and not is_free(context.device):
            return None  # amid another's graph, which is replayed without what was made before it
        step = self._step
        if step is None or not step.serves(context, part):
            step = self._step = None  # what is held is not written to
            step = self._step = self._made(context)
        if step.ready is None or step.facts.get(part) != self._facts(part):
            return None
        step.left.discard(part)
        if not step.left:
            self._step = None  # nobody else asks: its memory is free when this block is done
        return step.ready

    def forget(self) -> None:
        self.step_begins()
        self._places.forget()
        self._side = None

    def step_begins(self) -> None:
        """What was made of a prompt is not looked at again."""
        self._step = None

    def _made(self, context: torch.Tensor) -> _Step:
        """Keys and values of a new prompt for all blocks; empty where that cannot be."""
        step = _Step(context, version_of(context), _stream(context))
        side = self._side_of([part for part in self.parts if self._fits(part, context)])
        rows = context.shape[0] * context.shape[1]
        size = rows * side.width * context.element_size()
        if not 2 < len(side.layers) <= MOST_WEIGHTS or size > MOST_PROMPT_BYTES:
            return step
        if self._ready(side.layers):
            return step
        step.facts = {part: self._facts(part) for part in side.parts}
        shaped = (context.shape, context.stride(), context.dtype, context.device)
        routes = self._places.of((shaped, laid(slots_of(side.layers))))
        calls = begin(self._session, routes, self._graphs)
        made = calls.recorded(partial(_joint, side), {"context": context}, (side,))
        step.ready, step.left = Ready(made, side), {*side.parts}
        return step

    def _side_of(self, parts: Sequence[Attention]) -> Side:
        """The same object as long as they are the same."""
        if self._side is None or self._side.parts != tuple(parts):
            self._side = Side(parts)
        return self._side

    def _facts(self, part: Attention) -> _Facts:
        told, own = self._told, (part.to_k._parameters, part.to_v._parameters)
        return tuple([fact(each.get(name), told) for each in own for name in ("weight", "bias")])

    def _fits(self, part: Attention, context: torch.Tensor) -> bool:
        """False for layers that are not where the prompt is, as while models are moved in parts,
        and for weights that may change unnoticed.
        """
        for layer in (part.to_k, part.to_v):
            weight: Any = layer._parameters["weight"]
            if version_of(weight) is None and not self._told:
                return False
            if weight.device != context.device or weight.dtype != context.dtype:
                return False
            if weight.shape[1] != context.shape[-1]:
                return False
        return True


def _stream(tensor: torch.Tensor) -> int:
    """On which it is computed with now."""
    return stream_of(tensor.device) if tensor.is_cuda else 0


def _joint(side: Side, calls: Calls, context: torch.Tensor) -> torch.Tensor:
    """What all layers make of `context`, side by side."""
    return compute.linear(calls, "kv", context.reshape(-1, context.shape[-1]), *side.layers)
