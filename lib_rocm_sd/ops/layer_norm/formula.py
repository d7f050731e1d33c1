"""LayerNorm by torch's operators: the reference."""

from __future__ import annotations

from lib_rocm_sd.ops.dtypes import FLOATS
from lib_rocm_sd.ops.lazily import torch


def sum_of(x: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """x + added in float64, which is exact enough to be rounded once."""
    return x.double() + added.double()


def normed(
    x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """LayerNorm over the last dimension in float64."""
    values = x.double()
    variance, mean = torch.var_mean(values, -1, correction=0, keepdim=True)
    y = (values - mean) / (variance + eps).sqrt()
    if gamma is not None:
        y = y * gamma.double()
    return y if beta is None else y + beta.double()


def reference(
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    eps: float,
    added: torch.Tensor | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The norm in float64; with `added` that of the rounded sum, and the sum."""
    if added is None:
        return normed(x, gamma, beta, eps)
    total = sum_of(x, added)
    return normed(total.to(x.dtype), gamma, beta, eps), total


def is_float(tensor: torch.Tensor) -> bool:
    """Whether it has one of the float types known here."""
    return tensor.dtype in FLOATS


def row_stride(x: torch.Tensor) -> int | None:
    """Elements between two rows (..., C) that are dense, the same everywhere; None where there is
    no such number. With one row it is C.
    """
    channels = x.shape[-1]
    if channels > 1 and x.stride(-1) != 1:
        return None
    apart, rows = channels, 1
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if rows == 1:
            apart = stride
        elif stride != apart * rows:
            return None
        rows *= size
    return apart
