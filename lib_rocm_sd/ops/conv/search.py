"""MIOpen's search for an algorithm, and how it is kept from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lib_rocm_sd.ops.lazily import is_there, torch


def no_search() -> AbstractContextManager[Any]:
    """torch's convolutions are computed without a search for the fastest algorithm."""
    if torch.version.hip is None and not torch.backends.cudnn.benchmark:
        return _NOTHING
    return _without_search()


@contextmanager
def _without_search() -> Iterator[None]:
    cudnn, miopen = torch.backends.cudnn, _miopen()
    flags: AbstractContextManager[Any] = nullcontext()
    if cudnn.benchmark:
        flags = cudnn.flags(cudnn.enabled, False, None, cudnn.deterministic, cudnn.allow_tf32)
    immediate = nullcontext() if miopen is None else miopen.flags(immediate=True)
    with flags, immediate:
        yield


_NOTHING: AbstractContextManager[Any] = nullcontext()


def searches() -> bool:
    """True where MIOpen would search although asked not to."""
    return is_there() and torch.version.hip is not None and _miopen() is None


def _miopen() -> Any:
    return getattr(torch.backends, "miopen", None)
