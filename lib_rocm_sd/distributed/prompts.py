"""Data parallel: each rank makes some of the pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lib_rocm_sd.distributed.group import Group


def for_each(group: Group, items: Sequence[Any], make: Callable[[Any, int], Any]) -> list[Any]:
    """`make(item, index)` of all items, by the ranks; in order on rank 0, [] on the others.

    Any number of items, also fewer than ranks; each rank takes a run of them by its weight. What is
    made of an item should depend on its index (a seed), not on the rank: then it is the same for
    any number of ranks. It is pickled: give images from the host's memory.
    """
    first, last = group.shares(len(items))[group.rank]
    own = [make(items[index], index) for index in range(first, last)]
    return [made for part in group.to_first(own) for made in part]
