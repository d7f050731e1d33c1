"""Several weights that are one, for they lie one after another."""

from __future__ import annotations

from collections.abc import Sequence

from lib_rocm_sd.ops.lazily import torch


def as_one(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Weights (columns, k) as (all columns, k), without a copy; None where they do not lie one
    after another in one memory. Neighbours in memory of two allocations are not one.
    """
    first, rows = weights[0], 0
    begin, k = first.data_ptr(), first.shape[1]
    row_bytes = k * first.element_size()
    for weight in weights:
        if weight.data_ptr() != begin + rows * row_bytes or not weight.is_contiguous():
            return None
        rows += weight.shape[0]
    memory = first.untyped_storage()
    if begin + rows * row_bytes > memory.data_ptr() + memory.nbytes():
        return None
    return first.as_strided((rows, k), (k, 1))
