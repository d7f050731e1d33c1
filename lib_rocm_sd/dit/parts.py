"""What a block of a diffusion transformer consists of, whoever wrote it, and what a call asks for.

Modules, not their parameters: these are read from the modules in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class Heads:
    """Attention's layers of one stream, which `module` has. `to_qkv`: three for queries, keys and
    values, or one for all. `norm_q`, `norm_k`: RMSNorm over each head, with a weight; both or none.
    `to_out` None: nobody reads what attention makes of this stream.
    """

    module: nn.Module
    to_qkv: tuple[nn.Linear, ...]
    to_out: nn.Linear | None
    norm_q: nn.Module | None
    norm_k: nn.Module | None

    def leaves(self) -> list[nn.Module]:
        more = (self.to_out, self.norm_q, self.norm_k)
        return [*self.to_qkv, *(layer for layer in more if layer is not None)]

    @property
    def widths(self) -> set[int]:
        """Channels of queries, keys and values; -1 where one layer makes them, and not alike."""
        if len(self.to_qkv) > 1:
            return {layer.out_features for layer in self.to_qkv}
        width, rest = divmod(self.to_qkv[0].out_features, 3)
        return {-1 if rest else width}


@dataclass(frozen=True, eq=False)
class FeedForward:
    """down(gelu(up(x))), by the approximation with tanh."""

    up: nn.Linear
    down: nn.Linear

    def leaves(self) -> list[nn.Module]:
        return [self.up, self.down]


@dataclass(frozen=True, eq=False)
class Stream:
    """What is done to the tokens of a picture, or to those of a prompt.

    `modulation` of SiLU of the time embedding makes the rows named in `rows`, side by side.
    `norm1`, `norm2`: LayerNorms without weights. `norm2` and `feed_forward` are None where the
    stream ends with this block's attention.
    """

    modulation: nn.Linear
    rows: tuple[str, ...]
    norm1: nn.LayerNorm
    heads: Heads
    norm2: nn.LayerNorm | None
    feed_forward: FeedForward | None

    def leaves(self) -> list[nn.Module]:
        more = [] if self.feed_forward is None else self.feed_forward.leaves()
        return [self.modulation, *self.heads.leaves(), *more]


ATTENTION = ("shift", "scale", "gate")
FEED_FORWARD = ("ff shift", "ff scale", "ff gate")
OWN = ("own shift", "own scale", "own gate")
"""What a modulation makes for attention, the feed-forward, the picture's own attention."""


@dataclass(frozen=True, eq=False)
class Joint:
    """A block of two streams that attend to both: Esser and others, "Scaling Rectified Flow
    Transformers for High-Resolution Image Synthesis" (2024), section 4. For a stream x,

    n = LayerNorm(x) (1 + scale) + shift; x += gate to_out(attention(n));
    m = LayerNorm(x) (1 + ff scale) + ff shift; x += ff gate feed_forward(m)

    `own`: the picture's attention to itself alone, with a modulation of its own, added to the first
    sum. Keys and values of the picture come before those of the prompt.
    """

    picture: Stream
    prompt: Stream
    own: Heads | None
    heads: int

    def leaves(self) -> list[nn.Module]:
        """Those whose parameters we read."""
        own = [] if self.own is None else self.own.leaves()
        return [*self.picture.leaves(), *self.prompt.leaves(), *own]


class JointCall(NamedTuple):
    """x (N, tokens, C), context (N, words, C), embedding (N, E).

    `answer(context, x)` is what the host's block gives of them; of a stream that ends, None.
    """

    x: torch.Tensor
    context: torch.Tensor
    embedding: torch.Tensor
    answer: Callable[[torch.Tensor | None, torch.Tensor], Any]

    @property
    def others(self) -> tuple[Any, ...]:
        return self.context, self.embedding
