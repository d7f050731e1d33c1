"""What a call of a linear layer is given, as the op's inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from lib_rocm_sd.ops.keys import described, tensor_errors
from lib_rocm_sd.ops.lazily import torch
from lib_rocm_sd.ops.linear.inputs import LinearInputs, placed
from lib_rocm_sd.ops.linear.problem import MOST_WEIGHTS

Weights: TypeAlias = "torch.Tensor | Sequence[torch.Tensor]"
Biases: TypeAlias = "torch.Tensor | Sequence[torch.Tensor | None] | None"


def inputs_of(
    x: torch.Tensor,
    weight: Weights,
    bias: Biases,
    residual: torch.Tensor | None,
    gate: bool,
    out: torch.Tensor | None,
) -> LinearInputs:
    """x (.., k), residual and out (.., columns) as rows. ValueError where that cannot be."""
    weights = [weight] if isinstance(weight, torch.Tensor) else list(weight)
    if bias is None or isinstance(bias, torch.Tensor):
        biases: list[torch.Tensor | None] = [bias] + [None] * (len(weights) - 1)
        if bias is not None and len(weights) > 1:
            raise ValueError(f"one bias for {len(weights)} weights: {described(bias=bias)}")
    else:
        biases = list(bias)
    if not 1 <= len(weights) <= MOST_WEIGHTS or len(biases) != len(weights):
        raise ValueError(
            f"{len(weights)} weights and {len(biases)} biases: 1 to {MOST_WEIGHTS}, as many of each"
        )
    lead = x.shape[:-1] if isinstance(x, torch.Tensor) else None
    for item in (x, residual, out):
        if item is not None and (
            not isinstance(item, torch.Tensor)
            or item.layout != torch.strided
            or item.is_meta
            or not item.ndim
            or item.shape[:-1] != lead
        ):
            raise ValueError(_unlike(x, residual, out))
    rows = None if residual is None else _rows(residual)
    into = None if out is None else rows if out is residual else _rows(out)
    if out is not None and into is not None and into.data_ptr() != out.data_ptr():
        raise ValueError(f"out is no rows in memory: {described(out=out)} {out.stride()}")
    if len(weights) == 1:
        return LinearInputs(_rows(x), weights[0], biases[0], rows, into, gate=gate)
    flat = [item for pair in zip(weights, biases, strict=True) for item in pair]
    first, first_bias, others, more = placed(flat)
    return LinearInputs(_rows(x), first, first_bias, rows, into, *others, gate, more)


def _unlike(x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor | None) -> str:
    """Why these are not rows that go together."""
    given = {"x": x, "residual": residual, "out": out}
    known = {name: item for name, item in given.items() if item is not None}
    lead = () if tensor_errors(**known) else x.shape[:-1]
    wrong = tensor_errors(**known) or [
        f"{name} must be ({', '.join(map(str, lead))}, ..)"
        for name, item in known.items()
        if item.ndim != x.ndim or item.shape[:-1] != lead or not item.ndim
    ]
    return f"{'; '.join(wrong)}: {described(**known)}"


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """(.., n) as (rows, n), in the same memory where that can be."""
    if tensor.ndim == 2:
        return tensor
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
