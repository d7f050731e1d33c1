"""Masks that say how many of the first keys count: attention then reads no others."""

from __future__ import annotations

import weakref

import torch

from lib_rocm_sd.engine.memory import version_of
from lib_rocm_sd.graphs.device import is_free

_Known = tuple["weakref.ref[torch.Tensor] | None", int | None, "torch.Tensor | None"]
_known: _Known = (None, None, None)
"""The mask that was read last, its version then, and its lengths."""


def key_lengths(counts: torch.Tensor) -> torch.Tensor | None:
    """Lengths (N, 1, 1) in int32 of a mask (N, keys) of bool whose True come first, one at least in
    each row; None of another. It waits for the device, once for each version of a tensor: a mask is
    the same in all blocks of a step. An inference tensor has no version, and is not read; nor is
    one amid a recording.
    """
    global _known
    version = version_of(counts)
    if version is None or (counts.is_cuda and not is_free(counts.device)):
        return None
    seen, then, lengths = _known
    if seen is None or seen() is not counts or then != version:
        summed = counts.sum(1, keepdim=True, dtype=torch.int32)
        first = torch.arange(counts.shape[1], device=counts.device) < summed
        prefix = bool(((counts == first).all() & (summed > 0).all()).item())
        lengths = summed[..., None] if prefix else None
        _known = weakref.ref(counts), version, lengths
    return lengths
