"""The tensors of a linear layer: their checks, the problem that they pose, random ones."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

from lib_rocm_sd.ops.base import reasons
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES, DTYPES
from lib_rocm_sd.ops.keys import described, tensor_errors
from lib_rocm_sd.ops.lazily import torch
from lib_rocm_sd.ops.linear.problem import (
    FEW_WEIGHTS,
    MOST_WEIGHTS,
    LinearProblem,
)


class LinearInputs(NamedTuple):
    """x (rows, k), weights (columns, k), biases (columns); with `gate` one weight (2 columns, k).
    residual (rows, all columns); `out` is the residual, or None. `more`: further weights, each
    followed by its bias or None.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    out: torch.Tensor | None = None
    weight_1: torch.Tensor | None = None
    bias_1: torch.Tensor | None = None
    weight_2: torch.Tensor | None = None
    bias_2: torch.Tensor | None = None
    gate: bool = False
    more: tuple[torch.Tensor | None, ...] = ()

    @property
    def named(self) -> dict[str, Any]:
        """All tensors that are given."""
        items = [*zip(self._fields[:-2], self[:-2], strict=True)]
        for place, item in enumerate(self.more):
            kind = "bias" if place % 2 else "weight"
            items.append((f"{kind}_{FEW_WEIGHTS + place // 2}", item))
        return {name: item for name, item in items if item is not None}

    @property
    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Each weight with its bias."""
        every = [(self.weight_1, self.bias_1), (self.weight_2, self.bias_2)]
        every += zip(self.more[::2], self.more[1::2], strict=True)
        return [(self.weight, self.bias), *((w, b) for w, b in every if w is not None)]


_MOST_SHOWN = 12
"""Tensors, in an error."""


def problem_of(inputs: LinearInputs) -> LinearProblem:
    """ValueError, with all shapes, on a caller's mistake."""
    tensors = inputs.named
    wrong = tensor_errors(**tensors) or _errors(inputs, tensors)
    if wrong:
        first = dict([*tensors.items()][:_MOST_SHOWN])
        rest = f" and {len(tensors) - len(first)} more" if len(tensors) > len(first) else ""
        raise ValueError(f"{'; '.join(dict.fromkeys(wrong))}: {described(**first)}{rest}")
    x, layers, gate = inputs.x, inputs.layers, inputs.gate
    return LinearProblem(
        x.shape[0],
        x.shape[1],
        tuple(weight.shape[0] // (1 + gate) for weight, _ in layers),
        DTYPE_NAMES[x.dtype],
        any(bias is not None for _, bias in layers),
        inputs.residual is not None,
        gate,
        inputs.out is not None,
    )


def key_of(inputs: LinearInputs) -> Hashable:
    """All that the problem, its checks and gradients hang on, without the checks themselves: a
    UNet asks hundreds of times in a step. ValueError for what is no dense tensor.
    """
    out, graded = inputs.out, torch.is_grad_enabled()
    parts: list[Hashable] = [inputs.gate, graded]
    for item in (*inputs[:-2], *inputs.more):
        if item is None:
            parts.append(None)
        elif isinstance(item, torch.Tensor) and item.layout == torch.strided:
            parts += (item.shape, item.stride(), item.dtype, item.device)
            parts.append(graded and item.requires_grad)
        else:
            problem_of(inputs)
    if out is not None:
        parts += (_same(out, inputs.residual), overlap(out, inputs.x))
    return tuple(parts)


def _errors(inputs: LinearInputs, tensors: dict[str, torch.Tensor]) -> list[str]:
    x, residual, out = inputs.x, inputs.residual, inputs.out
    layers = inputs.layers
    mistakes = reasons(
        (x.ndim != 2, "x must be (.., k)"),
        (
            x.dtype not in DTYPE_NAMES or x.dtype == torch.bool,
            f"dtype {x.dtype} is not a float type known here",
        ),
        *((t.dtype != x.dtype, f"{name} must be {x.dtype}") for name, t in tensors.items()),
        *((t.device != x.device, f"{name} must be on {x.device}") for name, t in tensors.items()),
    )
    if mistakes:
        return mistakes
    rows, k = x.shape
    mistakes = reasons((k == 0, "x has no columns"))
    for weight, bias in layers:
        shaped = weight.ndim == 2 and weight.shape[1] == k
        mistakes += reasons(
            (not shaped, f"a weight must be (columns, {k}), not {tuple(weight.shape)}"),
            (
                shaped and bias is not None and bias.shape != weight.shape[:1],
                f"a bias must be {tuple(weight.shape[:1])} where its weight is",
            ),
            (inputs.gate and shaped and weight.shape[0] % 2, "two halves of a weight are unlike"),
        )
    mistakes += reasons((inputs.gate and len(layers) > 1, "a gate goes with one weight"))
    if mistakes:
        return mistakes
    shape = (rows, sum(weight.shape[0] for weight, _ in layers) // (1 + inputs.gate))
    return reasons(
        (residual is not None and residual.shape != shape, f"residual must be (.., {shape[1]})"),
        (out is not None and not _same(out, residual), "out must be the residual"),
        (out is not None and overlap(out, x), "out must not overlap x"),
    )


def _same(out: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """That they are the same memory, of which no element is there twice."""
    if (
        residual is None
        or out.ndim != 2
        or out.shape != residual.shape
        or out.stride() != residual.stride()
    ):
        return False
    rows_apart = out.shape[0] < 2 or out.stride(0) >= out.shape[1] * out.stride(1)
    return out.data_ptr() == residual.data_ptr() and rows_apart and out.stride(1) == 1


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """That two matrices may share memory; columns of one matrix side by side do not."""
    if a.ndim != 2 or b.ndim != 2:
        return True
    size, first_a, first_b = a.element_size(), a.data_ptr(), b.data_ptr()
    if first_b >= first_a + size * _span(a) or first_a >= first_b + size * _span(b):
        return False
    step = a.stride(0)
    if step != b.stride(0) or a.stride(1) != 1 or b.stride(1) != 1 or step < 1:
        return True
    apart = (first_b - first_a) // size % step
    return not (a.shape[1] <= apart and apart + b.shape[1] <= step)


def _span(matrix: torch.Tensor) -> int:
    """Elements from the first to the last; 0 where there is none."""
    rows, columns = matrix.shape
    if not rows or not columns:
        return 0
    return 1 + (rows - 1) * matrix.stride(0) + (columns - 1) * matrix.stride(1)


def make_inputs(problem: LinearProblem, device: torch.device, seed: int) -> LinearInputs:
    """Random; sums of products are about as large as bias and residual."""
    p, generator = problem, torch.Generator("cpu").manual_seed(seed)
    if len(p.columns) > MOST_WEIGHTS:
        raise ValueError(f"{len(p.columns)} weights are more than {MOST_WEIGHTS}")

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=generator) * scale
        return values.to(DTYPES[p.dtype]).to(device)

    x = drawn(p.rows, p.k)
    layers: list[torch.Tensor | None] = []
    for count in p.columns:
        layers.append(drawn(count * (1 + p.gate), p.k, scale=max(p.k, 1) ** -0.5))
        layers.append(drawn(count * (1 + p.gate)) if p.bias else None)
    if len(p.columns) == FEW_WEIGHTS and len(set(p.columns)) == 1 and not p.bias:
        weights = torch.cat([each for each in layers if each is not None])
        layers[::2] = weights.split(p.columns)  # one after another, as a UNet's blocks lay them
    weight, bias, others, more = placed(layers)
    assert weight is not None
    residual = drawn(p.rows, p.all_columns) if p.residual else None
    out = residual if p.in_place else None
    return LinearInputs(x, weight, bias, residual, out, *others, p.gate, more)


def placed(layers: Sequence[Any]) -> tuple[Any, Any, tuple[Any, Any, Any, Any], tuple[Any, ...]]:
    """Weights, each followed by its bias, as LinearInputs has them: the first, its bias, those of
    the next two, and more.
    """
    flat = (*layers, *(None,) * (2 * FEW_WEIGHTS - len(layers)))
    return flat[0], flat[1], flat[2 : 2 * FEW_WEIGHTS], flat[2 * FEW_WEIGHTS :]  # type: ignore[return-value]


# What a call of a linear layer is given, as the op's inputs.


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
    tensors = {"x": x, "residual": residual, "out": out}
    present = {name: item for name, item in tensors.items() if item is not None}
    lead = () if tensor_errors(**present) else x.shape[:-1]
    wrong = tensor_errors(**present) or [
        f"{name} must be ({', '.join(map(str, lead))}, ..)"
        for name, item in present.items()
        if item.ndim != x.ndim or item.shape[:-1] != lead or not item.ndim
    ]
    return f"{'; '.join(wrong)}: {described(**present)}"


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """(.., n) as (rows, n), in the same memory where that can be."""
    if tensor.ndim == 2:
        return tensor
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
