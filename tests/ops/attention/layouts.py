"""Ways in which q, k or v (B, S, H, D) may lie in memory. What a layout leaves unused is poison."""

from __future__ import annotations

from random import Random

import torch

from tests.poison import poisoned

LAYOUTS = ("plain", "heads first", "packed", "misaligned")
"""The usual ones, and one that no access of more than two bytes may read."""
ODD_LAYOUTS = (
    "ragged rows",
    "every second row",
    "sequence first",
    "repeated batch",
    "repeated heads",
    "repeated rows",
)
ALL_LAYOUTS = (*LAYOUTS, *ODD_LAYOUTS)


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """`x` (B, S, H, D) as a view of a storage of its own, of which it uses the last element.

    A repeated dimension has stride 0: all along it is what is first in `x`.
    """
    if layout == "plain":
        return x.clone()
    if layout == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sequence first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout.startswith("repeated"):
        dimension = ("repeated batch", "repeated rows", "repeated heads").index(layout)
        return x.narrow(dimension, 0, 1).clone().expand(x.shape)
    return _within_poison(x, layout).copy_(x)


def _within_poison(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A view of x's shape that leaves part of its storage unused."""
    batch, seq, heads, dim = x.shape
    if layout == "packed":
        return poisoned(x.new_empty((batch, seq, 2, heads, dim)))[:, :, 1]
    if layout == "every second row":
        return poisoned(x.new_empty((batch, seq, 2, heads, dim))).flatten(1, 2)[:, 1::2]
    if layout == "misaligned":
        storage = poisoned(x.new_empty((1 + batch * seq * heads * (dim + 3),)))
        return storage[1:].view(batch, seq, heads, dim + 3)[..., 3:]
    if layout == "ragged rows":
        row = heads * dim + 5
        storage = poisoned(x.new_empty((3 + batch * seq * row,)))
        return storage[3:].view(batch, seq, row)[..., 5:].view(batch, seq, heads, dim)
    raise ValueError(layout)


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` there, with its strides and offset, over a copy of its whole storage."""
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return storage.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def layouts_of(rng: Random) -> list[str]:
    """Layouts of q, k and v: mostly the usual ones, so that also fast accesses are met."""
    if rng.random() < 0.4:
        return [rng.choice(["plain", "heads first", "sequence first"]) for _ in range(3)]
    return [rng.choice(ALL_LAYOUTS) for _ in range(3)]
