"""What the blocks of a UNet consist of, whoever wrote them, and what one call of them asks for.

Modules, not their parameters: these are read from the modules in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import nn


class Timed(NamedTuple):
    """A layer of the time embedding, and the convolution that its values are added to; None where
    they are scales and shifts.
    """

    layer: nn.Linear
    conv: nn.Conv2d | nn.Conv3d | None


@dataclass(frozen=True, eq=False)
class Resnet:
    """conv2(silu(norm2(conv1(silu(norm1(x))) + embed(silu(emb))))) + shortcut(x).

    `embed` None: no time embedding. `embed_silu` False: it comes with SiLU applied. `shortcut` is a
    1x1 convolution, or None for x itself. `modulates`: conv2(silu(norm2(conv1(..)) (1 + a) + b)),
    where a and b are the halves of embed(silu(emb)). `resize`: "up" or "down" where x, and what is
    given to conv1, are first made twice the size (nearest), or half of it (means).
    """

    norm1: nn.GroupNorm
    conv1: nn.Conv2d
    embed: nn.Linear | None
    embed_silu: bool
    norm2: nn.GroupNorm
    conv2: nn.Conv2d
    shortcut: nn.Conv2d | None
    modulates: bool = False
    resize: str = ""

    @cached_property
    def timed(self) -> Timed | None:
        if self.embed is None:
            return None
        return Timed(self.embed, None if self.modulates else self.conv1)

    def leaves(self) -> list[nn.Module]:
        found = (self.norm1, self.conv1, self.embed, self.norm2, self.conv2, self.shortcut)
        return [module for module in found if module is not None]


@dataclass(frozen=True, eq=False)
class ResnetOverFrames:
    """x + (1 - a) conv2(silu(norm2(conv1(silu(norm1(x))) + embed(silu(emb))))), x being what
    `images` gives, or the one of `blocks`, which is called.

    Means are over all frames of a video, convolutions over a pixel's of 3 frames; a is
    sigmoid(mix_factor) of `mixer`, and 1 in a frame that stands still.
    """

    blocks: tuple[nn.Module, ...]
    norm1: nn.GroupNorm
    conv1: nn.Conv3d
    embed: nn.Linear
    norm2: nn.GroupNorm
    conv2: nn.Conv3d
    mixer: nn.Module
    images: Resnet | None = None
    embed_silu: ClassVar[bool] = True

    @cached_property
    def timed(self) -> Timed:
        return Timed(self.embed, self.conv1)

    def leaves(self) -> list[nn.Module]:
        within = [] if self.images is None else self.images.leaves()
        return [self.norm1, self.conv1, self.embed, self.norm2, self.conv2, *within]


@dataclass(frozen=True, eq=False)
class KeysValues:
    """What makes keys and values side by side: to_k and to_v, or one layer for both."""

    layers: tuple[nn.Linear, ...]


@dataclass(frozen=True, eq=False)
class Attention:
    """to_out(attention(to_q(x), to_kv(context))), scaled by head_dim ** -0.5. Where `to_kv` has no
    layers, to_q makes keys and values of x, too, beside its queries. `to_kv_more`: of other
    contexts, to which the same queries attend before to_out (see More).
    """

    to_q: nn.Linear
    to_kv: KeysValues
    to_out: nn.Linear
    heads: int
    to_kv_more: tuple[KeysValues, ...] = ()

    @property
    def of_x(self) -> tuple[nn.Linear, ...]:
        """What makes queries, keys and values of x side by side."""
        return self.to_q, *self.to_kv.layers

    def leaves(self) -> list[nn.Module]:
        more = (layer for each in self.to_kv_more for layer in each.layers)
        return [*self.of_x, self.to_out, *more]


@dataclass(frozen=True, eq=False)
class FeedForward:
    """out(a * gelu(b)), where a and b are the halves of gated(x)."""

    gated: nn.Linear
    out: nn.Linear

    def leaves(self) -> list[nn.Module]:
        return [self.gated, self.out]


@dataclass(frozen=True, eq=False)
class Block:
    """x += attn1(norm1(x)); x += attn2(norm2(x), context); x += ff(norm3(x)).

    `self_attention`, `cross_attention`, `feed_forward`: None where ours cannot compute what the
    module does, which is then called as it is. `attn2` and `norm2` are None where there is none.
    `crosses_twice`: attn1 is given the context, too. `norm_in`, `ff_in`: of a block that attends
    over frames, x += ff_in(norm_in(x)) comes first.
    """

    norm1: nn.LayerNorm
    norm2: nn.LayerNorm | None
    norm3: nn.LayerNorm
    attn1: nn.Module
    attn2: nn.Module | None
    ff: nn.Module
    self_attention: Attention | None
    cross_attention: Attention | None
    feed_forward: FeedForward | None
    crosses_twice: bool = False
    norm_in: nn.LayerNorm | None = None
    ff_in: FeedForward | None = None

    def leaves(self) -> list[nn.Module]:
        """Those whose parameters we read."""
        ours = (self.self_attention, self.cross_attention, self.feed_forward, self.ff_in)
        every = (self.norm1, self.norm2, self.norm3, self.norm_in)
        norms = [norm for norm in every if norm is not None]
        return [*norms, *(leaf for part in ours if part is not None for leaf in part.leaves())]

    def joint(self) -> tuple[nn.Linear, ...]:
        """Layers of the same rows, side by side in one product: none, or those of attention."""
        own = self.self_attention
        return () if own is None or self.crosses_twice else own.of_x

    def crossing(self) -> tuple[Attention, ...]:
        """Those of the context."""
        own = self.self_attention if self.crosses_twice else None
        return tuple(each for each in (own, self.cross_attention) if each is not None)


@dataclass(frozen=True, eq=False)
class Transformer:
    """x + proj_out(blocks(proj_in(norm(x)))), pixels being tokens. The blocks are called."""

    norm: nn.GroupNorm
    proj_in: nn.Module
    blocks: tuple[nn.Module, ...]
    proj_out: nn.Module

    def leaves(self) -> list[nn.Module]:
        return [self.norm, self.proj_in, self.proj_out]


@dataclass(frozen=True, eq=False)
class TransformerOverFrames(Transformer):
    """The same where after each of the first half of `blocks` one of the second goes over frames:
    it is given tokens and what `place(frames, dtype=..)` adds to those of each frame, and `mixer`
    mixes what it gives with what came before, as in ResnetOverFrames.
    """

    place: Callable[..., torch.Tensor]
    mixer: nn.Module


@dataclass(frozen=True, eq=False)
class ImageAttention:
    """x + to_out(attention(to_q(norm(x)), ..)), pixels being tokens: over what `added` makes of the
    context, and then these tokens.
    """

    norm: nn.GroupNorm
    own: Attention
    added: KeysValues

    def leaves(self) -> list[nn.Module]:
        return [self.norm, *self.own.leaves(), *self.added.layers]

    def crossing(self) -> tuple[Attention, ...]:
        """That of the context alone."""
        return (replace(self.own, to_kv=self.added),)


@dataclass(frozen=True, eq=False)
class Resample:
    """A 3x3 convolution of x enlarged to twice its size (nearest), or in steps of two pixels."""

    conv: nn.Conv2d
    up: bool

    def leaves(self) -> list[nn.Module]:
        return [self.conv]


@dataclass(frozen=True, eq=False)
class Ends:
    """What a UNet begins and ends with: a GroupNorm, SiLU and a 3x3 convolution, or some of it; or
    a 1x1 convolution, by which a ControlNet makes one of its results.
    """

    norm: nn.GroupNorm | None
    silu: bool
    conv: nn.Conv2d | None

    @property
    def is_linear(self) -> bool:
        return self.conv is not None and self.conv.kernel_size == (1, 1)

    def leaves(self) -> list[nn.Module]:
        return [module for module in (self.norm, self.conv) if module is not None]


class Parts(Protocol):
    """Those of a block of some kind, here or in dit/parts.py, where some are called as they are."""

    def leaves(self) -> list[Any]: ...


class ImageCall(NamedTuple):
    """x (N, C, H, W), and for a Resnet emb (N, E)."""

    x: torch.Tensor
    emb: torch.Tensor | None = None

    @property
    def others(self) -> tuple[Any, ...]:
        """What is given beside x, whose shapes count too."""
        return (self.emb,)


class VideoCall(NamedTuple):
    """x (N * frames, C, H, W), emb (N * frames, E); `still` (N, frames) is not 0 where a frame is
    a picture of its own.
    """

    x: torch.Tensor
    emb: torch.Tensor
    still: torch.Tensor

    @property
    def others(self) -> tuple[Any, ...]:
        return self.emb, self.still


class Region(NamedTuple):
    """Where an attention counts: by the `image`th of a mask (1, images, H, W), anywhere, of which
    `weigh(that, N, tokens)` makes (N, tokens, 1).
    """

    mask: torch.Tensor
    image: int
    weigh: Callable[[torch.Tensor, int, int], torch.Tensor]


class More(NamedTuple):
    """One attention more, `scale` times and where `region` has it: to what the `number`th of
    Attention.to_kv_more makes of `context` (N, .., keys, E); of (N, images, keys, E) to one image's
    if there is a region. IP-Adapter (Ye and others 2023) adds such.
    """

    number: int
    context: torch.Tensor
    scale: float
    region: Region | None = None


class BlockCall(NamedTuple):
    """x (N, tokens, C), context (N, keys, E) or None.

    `own` and `cross`: what attn1 and attn2 are given beside x where they are called, or
    `attn1` and `attn2`, where another is to be called in their place. `plain_own`,
    `plain_cross`: that is no more than the context, `mask` (N, 1, keys), which is added to the
    scores of attn2, and `more` of its attentions, so ours can compute it. `positions` (1, tokens or
    more, C) are added to what attn1 and attn2 are given. `frames`: x is (N * frames, tokens, C),
    each token attends over its frames, and context is (N * tokens, keys, E).
    """

    x: torch.Tensor
    context: torch.Tensor | None
    own: Mapping[str, Any]
    cross: Mapping[str, Any]
    plain_own: bool = True
    plain_cross: bool = True
    mask: torch.Tensor | None = None
    more: tuple[More, ...] = ()
    attn1: Callable[..., torch.Tensor] | None = None
    attn2: Callable[..., torch.Tensor] | None = None
    positions: torch.Tensor | None = None
    frames: int = 0

    @property
    def batch(self) -> int:
        """How many attend each for itself."""
        rows, tokens = self.x.shape[:2]
        return rows // self.frames * tokens if self.frames else rows

    @property
    def replaced(self) -> tuple[str, ...]:
        """Which of its attentions another is called for."""
        return tuple(name for name in ("attn1", "attn2") if getattr(self, name) is not None)

    @property
    def others(self) -> tuple[Any, ...]:
        more = (each.context for each in self.more)
        return (self.context, self.mask, self.positions, *more)


class TransformerCall(NamedTuple):
    """x (N, C, H, W). `given(i)`: what block i is given beside its tokens; `answer` wraps the
    result. `still`: as of VideoCall.
    """

    x: torch.Tensor
    given: Callable[[int], Mapping[str, Any]]
    answer: Callable[[torch.Tensor], Any]
    still: torch.Tensor | None = None

    @property
    def others(self) -> tuple[Any, ...]:
        return ()


class ImageAttentionCall(NamedTuple):
    """x (N, C, H, W), context (N, keys, E)."""

    x: torch.Tensor
    context: torch.Tensor

    @property
    def others(self) -> tuple[Any, ...]:
        return (self.context,)


Call = ImageCall | VideoCall | BlockCall | TransformerCall | ImageAttentionCall
