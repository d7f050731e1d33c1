"""Pieces that ldm's, sgm's and diffusers' transformer blocks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lib_rocm_sd.modules.findings import Findings
from lib_rocm_sd.unet.parts import Attention, FeedForward

_Part = TypeVar("_Part")


def whole(
    found: Findings, name: str, read: Callable[[Findings, str], _Part | None]
) -> _Part | None:
    """What `read` gives if nothing was found against it; else None, the reasons noted as partial.

    The rest of the block is read all the same: the module is called as it is.
    """
    part = found.part()
    made = read(part, name)
    found.watched += part.watched
    found.functions += part.functions
    if made is None or part.reasons:
        found.partly += part.reasons
        return None
    return made


def heads_of(found: Findings, part: Attention) -> Attention | None:
    """`part` if its sizes are those of attention with whole heads."""
    width = part.to_q.out_features
    sizes = {part.to_k.out_features, part.to_v.out_features, part.to_out.in_features}
    if sizes != {width} or part.heads < 1 or width % part.heads:
        found.add(f"{part.heads} heads of queries {width} wide, keys and values {sorted(sizes)}")
        return None
    return part


def gated(found: Findings, name: str, net: Sequence[Any]) -> FeedForward | None:
    """A feed-forward net of GEGLU, dropout and Linear; a second dropout may follow."""
    if not net:
        return None
    if not found.block(net[0], f"{name}.net.0", ("GEGLU",), ("proj",)):
        return None
    proj = found.linear(getattr(net[0], "proj", None), f"{name}.net.0.proj")
    for number in range(1, len(net)):
        if number != 2:
            found.no_dropout(net[number], f"{name}.net.{number}")
    out = found.linear(net[2], f"{name}.net.2")
    if proj is None or out is None:
        return None
    if proj.out_features != 2 * out.in_features:
        found.add(f"{name} has {proj.out_features} gated features for {out.in_features}")
        return None
    return FeedForward(proj, out)
