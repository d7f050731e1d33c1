"""Tensors as large as problems can be, of which memory takes only the pages that are touched."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod

import torch

LARGE_BYTES = 64 << 20
"""A larger storage is not one buffer: kernels may touch what is shown of it, and nothing else."""
FAR = (1 << 32) + (1 << 31) + 4096
"""Elements. In 32 bits it is negative or, without a sign, 2^31 too near: where nothing is shown."""
_MOST_BYTES = 1 << 41
"""More than any tensor of the tests has."""
_NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python's mmap has from 3.13 on


def missing() -> str | None:
    """Why there are no sparse tensors here."""
    if sys.platform != "linux":
        return "memory is not sparse on this system"
    try:
        sparse((_MOST_BYTES,), torch.uint8)
    except OSError as error:
        return f"no {_MOST_BYTES >> 40} TiB of addresses: {error}"
    return None


def sparse(
    shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None
) -> torch.Tensor:
    """Zeros of this shape and these strides, dense where none are given."""
    if strides is None:
        strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    count = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    return torch.frombuffer(pages, dtype=dtype).as_strided(tuple(shape), tuple(strides))


def spread(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A copy with these strides; of the memory between its elements nothing is touched."""
    return sparse(tensor.shape, tensor.dtype, strides).copy_(tensor)


def runs(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """First byte in the storage, and length, of each run of bytes that the elements fill."""
    if not tensor.numel():
        return
    length, start = tensor.element_size(), int(tensor.storage_offset()) * tensor.element_size()
    axes: list[tuple[int, int]] = []
    order = sorted(range(tensor.ndim), key=lambda axis: tensor.stride(axis))
    for axis in order:
        size, step = tensor.shape[axis], tensor.stride(axis) * tensor.element_size()
        if size == 1 or step == 0:
            continue
        if not axes and step <= length:
            length = (size - 1) * step + length
        else:
            axes.append((size, step))
    for places in product(*(range(size) for size, _ in axes)):
        steps = zip(places, axes, strict=True)
        yield start + sum(place * step for place, (_, step) in steps), length


def united(every: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Runs in order, those that meet or overlap as one."""
    first, end = 0, -1
    for start, length in sorted(every):
        if start > end:
            if end >= 0:
                yield first, end - first
            first = start
        end = max(end, start + length)
    if end >= 0:
        yield first, end - first
