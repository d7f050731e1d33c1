"""Dtypes by the names that problems and kernels call them by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from lib_rocm_sd.ops.base import HALVES as HALF_NAMES
from lib_rocm_sd.ops.base import ITEM_BYTES
from lib_rocm_sd.ops.lazily import torch

K = TypeVar("K")
V = TypeVar("V")


class _Table(Mapping[K, V]):
    """A dict that is made when it is first read: it needs torch, and importing it does not."""

    def __init__(self, make: Callable[[], dict[K, V]]) -> None:
        self._table = cache(make)

    def __getitem__(self, key: K) -> V:
        return self._table()[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._table())

    def __len__(self) -> int:
        return len(self._table())


def _dtypes() -> dict[str, torch.dtype]:
    return {name: getattr(torch, name) for name in ITEM_BYTES}


def _names() -> dict[torch.dtype, str]:
    return {**{dtype: name for name, dtype in _dtypes().items()}, torch.bool: "bool"}


DTYPES = _Table(_dtypes)
"""The float types known here."""
DTYPE_NAMES = _Table(_names)
"""Their names, and that of bool."""
FLOATS = DTYPES.values()
if TYPE_CHECKING:
    HALVES: tuple[torch.dtype, ...]
    """What our kernels read. Their names are HALVES of base.py."""


def __getattr__(name: str) -> Any:
    if name == "HALVES":
        return tuple(DTYPES[half] for half in HALF_NAMES)
    raise AttributeError(name)
