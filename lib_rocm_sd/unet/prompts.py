"""Keys and values of the prompt, as every transformer block wants them: by one launch.

They hang on the prompt and on weights alone. A block by itself has some hundred rows for them, too
few to fill a card. Hosts that give the same tensor in each step, as diffusers does, have them made
in the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn

from lib_rocm_sd.calls import Calls, Places, begin
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.graphs.device import stream_of
from lib_rocm_sd.graphs.programs import Graphs
from lib_rocm_sd.ops.linear.kernel import MOST_WEIGHTS
from lib_rocm_sd.unet import compute
from lib_rocm_sd.unet.parts import Attention
from lib_rocm_sd.unet.weights import fact, laid, slots_of, version_of
from lib_rocm_sd.unet_step import MOST_PROMPT_BYTES

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


class _Where(NamedTuple):
    """The stream on which something is launched, and whether somebody captures what is launched."""

    stream: int
    captured: bool

    @classmethod
    def now(cls, device: torch.device) -> _Where:
        if device.type != "cuda":
            return cls(0, False)
        return cls(stream_of(device), torch.cuda.is_current_stream_capturing())


@dataclass(eq=False)
class _Made:
    """What was made of a prompt, that had this version, with the facts of then. `lasts`: whether
    the next step may have it too. `left`: who has not asked for it yet.
    """

    context: ref[torch.Tensor]
    version: int | None
    where: _Where
    left: set[Attention]
    ready: Ready | None = None
    facts: dict[Attention, _Facts] = field(default_factory=dict)
    lasts: bool = False

    def is_of(self, context: torch.Tensor) -> bool:
        """Whether this prompt leads to it, unchanged, for whom comes after it on its stream. So a
        capture takes nothing from before it: a replay may find another prompt in the same memory.
        """
        if self.context() is not context or self.version != version_of(context):
            return False
        return self.where == _Where.now(context.device)

    def is_behind(self, part: Attention, facts: _Facts) -> bool:
        """Whether its weights have changed since an earlier step."""
        return part not in self.left and self.facts.get(part, facts) != facts


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
        self._made: _Made | None = None

    def of(self, context: torch.Tensor, part: Attention) -> Ready | None:
        """What holds the keys and values of `part` for context (N, tokens, E); None where it is to
        make them itself.
        """
        if len(self.parts) < 2 or (context.is_inference() and not self._told):
            return None
        made, facts = self._made, self._facts(part)
        if made is None or not made.is_of(context) or made.is_behind(part, facts):
            made = self._made = None  # what is held is not written to
            made = self._made = self._make(context)
            facts = self._facts(part)
        made.left.discard(part)
        if not made.left and not made.lasts:
            self._made = None
        return made.ready if made.facts.get(part) == facts else None

    def forget(self) -> None:
        self._made = None
        self._places.forget()
        self._side = None

    def step_begins(self) -> None:
        """What was made of a prompt that counts no changes is not looked at again."""
        if self._made is not None and self._made.version is None:
            self._made = None

    def _make(self, context: torch.Tensor) -> _Made:
        """Of a new prompt, for all blocks; empty where that cannot be. Its memory is free when the
        prompt is gone.
        """
        gone = partial(_let_go, ref(self))
        where, left = _Where.now(context.device), {*self.parts}
        made = _Made(ref(context, gone), version_of(context), where, left)
        side = self._side_of([part for part in self.parts if self._fits(part, context)])
        size = context.shape[0] * context.shape[1] * side.width * context.element_size()
        if not 2 < len(side.layers) <= MOST_WEIGHTS or size > MOST_PROMPT_BYTES:
            return made
        if self._ready(side.layers):
            return made
        made.facts = {part: self._facts(part) for part in side.parts}
        shaped = (context.shape, context.stride(), context.dtype, context.device)
        routes = self._places.of((*shaped, *laid(slots_of(side.layers))))
        calls = begin(self._session, routes, self._graphs)
        rows = calls.recorded(partial(_joint, side), {"context": context}, (side,))
        made.ready, made.left = Ready(rows, side), {*side.parts}
        graphs = calls.graphs_of(context.device)
        settled = graphs is None or bool(graphs.why) or (side,) in routes.recordings
        # A capture is replayed without another one; blocks read where a recording has made it.
        made.lasts = settled and not where.captured
        return made

    def _side_of(self, parts: Sequence[Attention]) -> Side:
        """The same object as long as they are the same."""
        if self._side is None or self._side.parts != tuple(parts):
            self._side = Side(parts)
        return self._side

    def _facts(self, part: Attention) -> _Facts:
        own = [layer._parameters for layer in (part.to_k, part.to_v)]
        return tuple(fact(p.get(name), self._told) for p in own for name in ("weight", "bias"))

    def _fits(self, part: Attention, context: torch.Tensor) -> bool:
        """False for layers that are not where the prompt is, as while models are moved in parts."""
        for layer in (part.to_k, part.to_v):
            weight: Any = layer._parameters["weight"]
            if weight.device != context.device or weight.dtype != context.dtype:
                return False
            if weight.shape[1] != context.shape[-1]:
                return False
        return True


def _let_go(prompts: ref[Prompts], context: ref[torch.Tensor]) -> None:
    """Nobody has this prompt any more."""
    held = prompts()
    if held is not None and held._made is not None and held._made.context is context:
        held._made = None


def _joint(side: Side, calls: Calls, context: torch.Tensor) -> torch.Tensor:
    """What all layers make of `context`, side by side."""
    return compute.linear(calls, "kv", context.reshape(-1, context.shape[-1]), *side.layers)
