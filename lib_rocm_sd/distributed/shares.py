"""Who gets how much: items or rows, split over ranks by weight."""

from __future__ import annotations

from collections.abc import Sequence

Part = tuple[int, int]
"""The first and the one after the last."""


def split(count: int, weights: Sequence[float], least: int = 0) -> list[Part]:
    """0 to `count` in one part for each weight, in order, as near to the weights as whole ones get.

    Each part has `least` or more. Raises ValueError where that is not possible.
    """
    if not weights or min(weights) <= 0:
        raise ValueError(f"weights have to be above 0, one for each rank: {list(weights)}")
    spare = count - least * len(weights)
    if spare < 0:
        raise ValueError(f"{count} cannot be split into {len(weights)} parts of {least} or more")
    sizes = _sizes(count, weights)
    while min(sizes) < least:
        sizes[sizes.index(min(sizes))] += 1
        sizes[sizes.index(max(sizes))] -= 1
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _sizes(count: int, weights: Sequence[float]) -> list[int]:
    """By largest remainder; of equal ones the first."""
    exact = [count * weight / sum(weights) for weight in weights]
    sizes = [int(size) for size in exact]
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i] - exact[i], i))
    for index in order[: count - sum(sizes)]:
        sizes[index] += 1
    return sizes
