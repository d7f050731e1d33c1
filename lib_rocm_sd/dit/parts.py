"""What a block of a diffusion transformer consists of, whoever wrote it, and what a call asks for.

Modules, not their parameters: these are read from the modules in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class Called:
    """A linear layer, or a norm, that is called as it is: its weights are brought, or made, in each
    call.
    """

    module: Any

    @property
    def in_features(self) -> int:
        return int(self.module.in_features)

    @property
    def out_features(self) -> int:
        return int(self.module.out_features)


Layer: TypeAlias = "nn.Linear | Called"


@dataclass(frozen=True, eq=False)
class Heads:
    """Attention's layers of one stream, which `module` has. `to_qkv`: three for queries, keys and
    values, or one for all. `norm_q`, `norm_k`: RMSNorm over each head, or `across` all heads, each
    with one parameter, and one `eps`; both or none. `to_out` None: nobody reads what attention
    makes of this stream.
    """

    module: nn.Module
    to_qkv: tuple[Layer, ...]
    to_out: Layer | None
    norm_q: nn.Module | None
    norm_k: nn.Module | None
    eps: float = 0.0
    across: bool = False

    def leaves(self) -> list[nn.Module | Called]:
        more = (self.to_out, self.norm_q, self.norm_k)
        return [*self.to_qkv, *(layer for layer in more if layer is not None)]

    @property
    def norms(self) -> tuple[Any, Any]:
        """Those of queries and of keys."""
        return self.norm_q, self.norm_k

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

    up: Layer
    down: Layer

    def leaves(self) -> list[nn.Module | Called]:
        return [self.up, self.down]


@dataclass(frozen=True, eq=False)
class Stream:
    """What is done to the tokens of a picture, or to those of a prompt.

    `modulation` of SiLU of the time embedding makes the rows named in `rows`, side by side; None:
    these are what a call is given in the embedding's place. `norm1`, `norm2`: LayerNorms without
    weights. `norm2` and `feed_forward` are None where the stream ends with this block's attention.
    """

    modulation: Layer | None
    rows: tuple[str, ...]
    norm1: nn.LayerNorm
    heads: Heads
    norm2: nn.LayerNorm | None
    feed_forward: FeedForward | None

    def leaves(self) -> list[nn.Module | Called]:
        first = [] if self.modulation is None else [self.modulation]
        more = [] if self.feed_forward is None else self.feed_forward.leaves()
        return [*first, *self.heads.leaves(), *more]


ATTENTION = ("shift", "scale", "gate")
FEED_FORWARD = ("ff shift", "ff scale", "ff gate")
OWN = ("own shift", "own scale", "own gate")
"""What a modulation makes for attention, the feed-forward, the picture's own attention."""


Bounded = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Joint:
    """A block of two streams that attend to both: Esser and others, "Scaling Rectified Flow
    Transformers for High-Resolution Image Synthesis" (2024), section 4. For a stream x,

    n = LayerNorm(x) (1 + scale) + shift; x += gate to_out(attention(n));
    m = LayerNorm(x) (1 + ff scale) + ff shift; x += ff gate feed_forward(m)

    `own`: the picture's attention to itself alone, with a modulation of its own, added to the first
    sum. `prompt_first`: positions of the prompt's tokens come before those of the picture's.
    `bounded`: what is done in fp16 with the prompt's result, in place, since it may overflow;
    `bounds_both`: with both results.
    """

    picture: Stream
    prompt: Stream
    own: Heads | None
    heads: int
    prompt_first: bool = False
    bounded: Bounded | None = None
    bounds_both: bool = False

    def leaves(self) -> list[nn.Module | Called]:
        """Those whose parameters we read."""
        own = [] if self.own is None else self.own.leaves()
        return [*self.picture.leaves(), *self.prompt.leaves(), *own]


@dataclass(frozen=True, eq=False)
class Single:
    """A block of one stream, of the tokens of prompt and picture one after another, whose attention
    and feed-forward are parallel: Dehghani and others, "Scaling Vision Transformers to 22 Billion
    Parameters" (2023), section 2.

    n = LayerNorm(x) (1 + scale) + shift; x += gate to_out([attention(n), gelu(up(n))])

    `modulation` as of Stream, for the rows of ATTENTION. `heads`: its `to_qkv`
    make what goes into GELU, too, behind queries, keys and values. `bounded` as of Joint.
    """

    modulation: Layer | None
    norm: nn.LayerNorm
    heads: Heads
    to_out: Layer
    count: int
    bounded: Bounded | None

    def leaves(self) -> list[nn.Module | Called]:
        """Those whose parameters we read."""
        first = [] if self.modulation is None else [self.modulation]
        return [*first, *self.heads.leaves(), self.to_out]


@dataclass(frozen=True, eq=False)
class Crossed:
    """A block of one stream that attends to itself, and then to a prompt: Chen and others,
    "PixArt-alpha: Fast Training of Diffusion Transformer for Photorealistic Text-to-Image
    Synthesis" (2023), section 2.3. For a stream x,

    n = LayerNorm(x) (1 + scale) + shift; x += gate to_out(attention(n)); x += crossing(x, prompt);
    m = LayerNorm(x) (1 + ff scale) + ff shift; x += ff gate feed_forward(m)

    `crossing`: its first layer makes queries of x, the others keys and values of the prompt.
    `norm`: what x is given to it through, or None.
    """

    stream: Stream
    norm: nn.LayerNorm | Called | None
    crossing: Heads
    heads: int

    def leaves(self) -> list[nn.Module | Called]:
        """Those whose parameters we read."""
        norm = [] if self.norm is None else [self.norm]
        return [*self.stream.leaves(), *norm, *self.crossing.leaves()]


@dataclass(frozen=True, eq=False)
class Sandwich:
    """A block of one stream, with an RMSNorm before and after attention, and before and after the
    feed-forward: Zhuo and others, "Lumina-Next: Making Lumina-T2X Stronger and Faster with
    Next-DiT" (2024), section 2. For a stream x,

    x += tanh(gate) norm2(to_out(attention(norm1(x) (1 + scale))));
    x += tanh(ff gate) norm4(down(silu(up(n)) gated(n))), where n = norm3(x) (1 + ff scale)

    `modulation` of the time embedding makes scale, gate, ff scale and ff gate; None: there are no
    such factors. `norms`: in that order. `up`: it and what makes `gated`.
    """

    modulation: Layer | None
    norms: tuple[nn.Module, ...]
    heads: Heads
    up: tuple[Layer, Layer]
    down: Layer
    count: int

    def leaves(self) -> list[nn.Module | Called]:
        """Those whose parameters we read."""
        first = [] if self.modulation is None else [self.modulation]
        return [*self.heads.leaves(), *first, *self.norms, *self.up, self.down]


class TokensCall(NamedTuple):
    """x (N, tokens, C), context (N, words, C) or, where x has both, None; embedding (N, E), or all
    rows (N, rows, C) that modulate picture and prompt, or None where nothing does; `rotary`,
    `rotary_sin` as HeadsInputs has them. `mask` (N, all tokens): its products of each two tokens
    are a mask of attention; of a Crossed, (N, 1, words): added to the scores of the prompt's; of
    others bool (N, 1, tokens): which of them count, or int32 (N, 1, 1): how many of the first do.

    `answer` gives what the host's block does: of context and x, of which a stream that ends is
    None; or, of a Single, of both in one tensor.
    """

    x: torch.Tensor
    context: torch.Tensor | None
    embedding: torch.Tensor | None
    answer: Callable[..., Any]
    rotary: torch.Tensor | None = None
    rotary_sin: torch.Tensor | None = None
    mask: torch.Tensor | None = None

    @property
    def others(self) -> tuple[Any, ...]:
        return self.context, self.embedding, self.rotary, self.rotary_sin, self.mask

    @property
    def given(self) -> dict[str, torch.Tensor]:
        """What a program is given, by name."""
        named = self._asdict()
        return {name: each for name, each in named.items() if isinstance(each, torch.Tensor)}
