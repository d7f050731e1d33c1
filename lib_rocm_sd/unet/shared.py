"""What the blocks of a step share, made for all of them by few launches when the first asks for it.

Of the time embedding: a layer of it, and the bias of the convolution that it is added to, for each
residual block. Of the prompt: keys and values for each transformer block, which hang on the prompt
and on weights alone; a block by itself has some hundred rows for them, too few to fill a card.

What was made is used only if neither what it was made of nor the weights have changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from lib_rocm_sd.calls import Calls, Places, Routes, begin
from lib_rocm_sd.catalog.unet import MOST_PROMPT_BYTES
from lib_rocm_sd.engine.memory import version_of
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.graphs.device import is_free, stream_of
from lib_rocm_sd.graphs.programs import Graphs
from lib_rocm_sd.ops.group_norm.formula import wide_of
from lib_rocm_sd.ops.linear.problem import MOST_WEIGHTS
from lib_rocm_sd.unet import compute
from lib_rocm_sd.unet.parts import Attention, KeysValues, Region, Timed
from lib_rocm_sd.unet.weights import fact, laid, slots_of

_Facts = tuple[Any, ...]
_S = TypeVar("_S")


class _Shared(Generic[_S]):
    """`ready(layers)`: makes their weights those that are wanted, or says why ours must not read
    them. `told`: see Hook.tells.
    """

    def __init__(
        self,
        ready: Callable[[Sequence[nn.Module]], str],
        session: Session,
        graphs: Graphs,
        told: bool,
    ) -> None:
        self._ready, self._session, self._graphs = ready, session, graphs
        self._told = told
        self._places = Places()
        self._step: _S | None = None

    def forget(self) -> None:
        self._step = None
        self._places.forget()

    def step_begins(self) -> None:
        """What was made is not looked at again."""
        self._step = None

    def _calls(self, given: torch.Tensor, *read: Any) -> Calls:
        """Those of the program that makes it of `given`; all else that it reads lies as `read`."""
        shaped = (given.shape, given.stride(), given.dtype, given.device)
        return begin(self._session, self._places.of((shaped, read)), self._graphs)

    def _of(self, layer: nn.Module) -> _Facts:
        """Facts of a layer's weight and bias."""
        own, told = layer._parameters, self._told
        return fact(own.get("weight"), told), fact(own.get("bias"), told)

    def _suits(self, layer: nn.Module, given: torch.Tensor) -> bool:
        """False for a layer that is not where `given` is, as while models are moved in parts."""
        weight: Any = layer._parameters["weight"]
        same = weight.device == given.device and weight.dtype == given.dtype
        return same and weight.shape[1] == given.shape[-1]


# The time embedding.


@dataclass(frozen=True)
class _EmbeddingStep:
    """What was made of an embedding, that had this version: by block, with the facts of then."""

    emb: torch.Tensor
    version: int | None
    made: dict[Timed, tuple[_Facts, torch.Tensor]]


class Embeddings(_Shared[_EmbeddingStep]):
    """`timed`: of the residual blocks that apply SiLU to the embedding."""

    timed: tuple[Timed, ...] = ()

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
            step = self._step = _EmbeddingStep(emb, version_of(emb), self._made(emb))
        known = step.made.get(timed)
        if known is not None and known[0] == self._facts(timed):
            return known[1]
        return self._alone(nn.functional.silu(emb), timed)

    def _alone(self, active: torch.Tensor, timed: Timed) -> torch.Tensor:
        made = compute.linear(begin(self._session, Routes()), "alone", active, timed.layer)
        return _with_biases(made, [] if timed.conv is None else [_bias(timed).to(made.device)])

    def _made(self, emb: torch.Tensor) -> dict[Timed, tuple[_Facts, torch.Tensor]]:
        """What all blocks add for a new embedding; empty where that cannot be."""
        timed = [each for each in self.timed if self._fits(each, emb)]
        layers = [each.layer for each in timed]
        if len(layers) < 2 or self._ready(layers):
            return {}
        facts = [self._facts(each) for each in timed]
        modulate = all(each.conv is None for each in timed)
        biases = [] if modulate else [_bias(each) for each in timed]
        at = tuple(bias.data_ptr() for bias in biases)
        calls = self._calls(emb, laid(slots_of(layers)), at)
        run = partial(_embedded, layers, biases)
        joint = calls.recorded(run, {"embedding": emb}, tuple(layers))
        parts = joint.split([layer.out_features for layer in layers], -1)
        return dict(zip(timed, zip(facts, parts, strict=True), strict=True))

    def _facts(self, timed: Timed) -> _Facts:
        return *self._of(timed.layer), fact(_own_bias(timed), self._told)

    def _fits(self, timed: Timed, emb: torch.Tensor) -> bool:
        """False also for a bias that may change unnoticed."""
        bias = _own_bias(timed)
        if bias is not None and version_of(bias) is None and not self._told:
            return False
        same = bias is None or (bias.device, bias.dtype) == (emb.device, emb.dtype)
        return same and self._suits(timed.layer, emb)


def _embedded(
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
    return _with_biases(parts[0] if len(parts) == 1 else torch.cat(parts, -1), biases)


def _with_biases(rows: torch.Tensor, biases: list[torch.Tensor]) -> torch.Tensor:
    """In float32 at least."""
    return rows + torch.cat(biases).float() if biases else rows.to(wide_of(rows))


def _own_bias(timed: Timed) -> torch.Tensor | None:
    """The convolution's parameter."""
    return None if timed.conv is None else timed.conv._parameters.get("bias")


def _bias(timed: Timed) -> torch.Tensor:
    """The parameter itself, or zeros."""
    bias = _own_bias(timed)
    return timed.layer.weight.new_zeros(len(timed.layer.weight)) if bias is None else bias.detach()


# The prompt.

MOST_SIDES = 4
"""Kept at a time: blocks may skip a prompt in every other call."""


class Side:
    """Attentions whose keys and values lie side by side. Equal only to itself: what a graph has
    recorded reads the columns of one.
    """

    def __init__(self, parts: tuple[KeysValues, ...]) -> None:
        self.parts = parts
        self.layers = [layer for part in parts for layer in part.layers]
        self.columns: dict[KeysValues, tuple[int, int]] = {}
        """The first of each, and how many."""
        self.width = 0
        for part in parts:
            count = sum(layer.out_features for layer in part.layers)
            self.columns[part] = self.width, count
            self.width += count


@dataclass(frozen=True)
class Ready:
    """Keys and values of many attentions: `rows` (N * .. * tokens, side.width)."""

    rows: torch.Tensor
    side: Side


@dataclass(eq=False)
class _PromptStep:
    """What was made of a prompt, that had this version, on a stream, with the facts of then.
    `left`: who has not asked for it yet.
    """

    context: torch.Tensor
    version: int | None
    stream: int
    ready: Ready | None = None
    facts: dict[KeysValues, _Facts] = field(default_factory=dict)
    left: set[KeysValues] = field(default_factory=set)

    def serves(self, context: torch.Tensor, part: KeysValues) -> bool:
        """Whether `part` may be given what was made. Who asks again is in another step, before
        which prompt and weights may have been written to unnoticed.
        """
        same = context is self.context and version_of(context) == self.version
        asks_again = part in self.facts and part not in self.left
        return same and not asks_again and self.stream == _stream(context)


class Prompts(_Shared[_PromptStep]):
    """`parts`: of the cross-attentions that are ours. `more`: the same for each of their other
    contexts.
    """

    parts: tuple[KeysValues, ...] = ()
    more: tuple[Prompts, ...] = ()
    _sides: Mapping[tuple[KeysValues, ...], Side] = {}
    _skipping: frozenset[KeysValues] = frozenset()

    def share(self, crossing: Sequence[Attention]) -> None:
        """Tell whose keys and values are made together."""
        self._shared_by(tuple(each.to_kv for each in crossing))
        others = list(zip_longest(*(each.to_kv_more for each in crossing)))
        if len(others) != len(self.more):
            own = self._ready, self._session, self._graphs, self._told
            self.more = tuple(Prompts(*own) for _ in others)
        for each, parts in zip(self.more, others, strict=True):
            each._shared_by(tuple(filter(None, parts)))

    def _shared_by(self, parts: tuple[KeysValues, ...]) -> None:
        if parts != self.parts:
            self._sides = {}
        self.parts, self._skipping = parts, self._skipping.intersection(parts)

    def skip(self, part: KeysValues) -> None:
        """Tell that `part` does not ask in this step: nothing is made for it until it asks again,
        and nothing kept.
        """
        step = self._step
        if part not in self._skipping:
            self._skipping |= {part}
        if step is not None and part in step.left:
            step.left.discard(part)
            if not step.left:
                step.ready = None  # the step stays: others may ask that nothing was made for

    def of(self, context: torch.Tensor, part: KeysValues) -> Ready | None:
        """What holds the keys and values of `part` for context (N, .., tokens, E); None where it is
        to make them itself.
        """
        if part in self._skipping:
            self._skipping -= {part}
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
        super().forget()
        self._sides = {}
        for each in self.more:
            each.forget()

    def step_begins(self) -> None:
        super().step_begins()
        for each in self.more:
            each.step_begins()

    def _made(self, context: torch.Tensor) -> _PromptStep:
        """Keys and values of a new prompt for all blocks; empty where that cannot be."""
        step = _PromptStep(context, version_of(context), _stream(context))
        asking = (part for part in self.parts if part not in self._skipping)
        fitting = tuple(part for part in asking if self._fits(part, context))
        side = self._sides.get(fitting)
        if side is None:  # else the same object
            side = Side(fitting)
            known = self._sides if len(self._sides) < MOST_SIDES else {}
            self._sides = {**known, fitting: side}
        rows = context.shape[:-1].numel()
        size = rows * side.width * context.element_size()
        if len(side.parts) < 2 or len(side.layers) > MOST_WEIGHTS or size > MOST_PROMPT_BYTES:
            return step
        if self._ready(side.layers):
            return step
        step.facts = {part: self._facts(part) for part in side.parts}
        calls = self._calls(context, laid(slots_of(side.layers)))
        made = calls.recorded(partial(_keys_and_values, side), {"context": context}, (side,))
        step.ready, step.left = Ready(made, side), {*side.parts}
        return step

    def _facts(self, part: KeysValues) -> _Facts:
        return tuple(map(self._of, part.layers))

    def _fits(self, part: KeysValues, context: torch.Tensor) -> bool:
        """False also for weights that may change unnoticed."""
        for layer in part.layers:
            weight: Any = layer._parameters["weight"]
            if version_of(weight) is None and not self._told:
                return False
            if not self._suits(layer, context):
                return False
        return True


class Regions:
    """How much pixels count in regions: made once in a step for all blocks with as many of them."""

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[Region, int | None, torch.Tensor]] = {}
        self._asked: set[Hashable] = set()

    def of(self, region: Region, x: torch.Tensor, part: Attention) -> torch.Tensor:
        """(N, tokens, 1) for x (N, tokens, C) of `part`, like x. Who asks again is in another step,
        before which the mask may have been written to unnoticed.
        """
        key = (id(region.mask), region.image, *x.shape[:2], x.dtype, x.device)
        if (key, part) in self._asked:
            self.forget()
        self._asked.add((key, part))
        _, version, weights = self._made.get(key, (None, None, None))
        if weights is None or version != version_of(region.mask):
            made = region.weigh(region.mask[:, region.image], *x.shape[:2])
            weights = made.to(x.device, x.dtype)
            self._made[key] = region, version_of(region.mask), weights
        return weights

    def forget(self) -> None:
        self._made.clear()
        self._asked.clear()


def _stream(tensor: torch.Tensor) -> int:
    """On which it is computed with now."""
    return stream_of(tensor.device) if tensor.is_cuda else 0


def _keys_and_values(side: Side, calls: Calls, context: torch.Tensor) -> torch.Tensor:
    """What all layers make of `context`, side by side."""
    return compute.linear(calls, "kv", context.reshape(-1, context.shape[-1]), *side.layers)
