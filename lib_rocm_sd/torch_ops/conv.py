"""`rocm_sd::conv` and `rocm_sd::conv_and_norm`: weights are read as they lie.

Channels-last weights (Co, Ci, 3, 3) are read from their own memory; of others a copy is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lib_rocm_sd.functional import group_norm_finalize
from lib_rocm_sd.ops.conv.inputs import ConvInputs, NextNorm
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import ConvProblem, output_shape
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.ops.group_norm.formula import wide_of
from lib_rocm_sd.ops.keys import described
from lib_rocm_sd.torch_ops.torch_op import Posed, TorchOp
from lib_rocm_sd.torch_ops.weights import KeptWeights

Two = tuple[torch.Tensor, torch.Tensor]
Weights = Callable[[torch.Tensor, "torch.Tensor | None"], ConvWeights]
_fresh: Weights = partial(ConvWeights, in_rows=True)
KEPT = KeptWeights()


def _posed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    kind: str = "3x3",
    norm: torch.Tensor | None = None,
    shortcut: torch.Tensor | None = None,
    shortcut_weight: torch.Tensor | None = None,
    embedding: torch.Tensor | None = None,
    weights: Weights = _fresh,
    following: NextNorm | None = None,
) -> Posed:
    if kind not in CONVS:
        raise ValueError(f"kind {kind} is none of {', '.join(CONVS)}")
    finish = group_norm_finalize if following is not None and weights is not _fresh else None
    try:
        held = weights(weight, bias)
    except ValueError as error:
        raise ValueError(f"{error}, {described(x=x)}") from None
    inputs = ConvInputs(
        *(x, held, norm, shortcut, following, None, None, None, finish),
        *(embedding, shortcut_weight),
    )
    return CONVS[kind], inputs


def _posed_with_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    groups: int,
    eps: float = 1e-5,
    kind: str = "3x3",
    norm: torch.Tensor | None = None,
    shortcut: torch.Tensor | None = None,
    shortcut_weight: torch.Tensor | None = None,
    embedding: torch.Tensor | None = None,
    weights: Weights = _fresh,
) -> Posed:
    following = NextNorm(gamma, beta, groups, eps)
    fused = (kind, norm, shortcut, shortcut_weight, embedding)
    return _posed(x, weight, bias, *fused, weights, following)


def _y_empty(problem: ConvProblem, inputs: ConvInputs) -> Two:
    """y and a norm, which `conv` does not give."""
    x = inputs.x
    norm = x.new_empty((problem.batch, problem.out_channels, 2), dtype=wide_of(x))
    return x.new_empty(output_shape(problem)), norm


def _y(made: Any, inputs: ConvInputs, x: torch.Tensor) -> torch.Tensor:
    """The result y; for an x without elements the op gives it alone."""
    y: torch.Tensor = made if isinstance(made, torch.Tensor) else made[0]
    return y.contiguous()


def _both(made: Any, inputs: ConvInputs, x: torch.Tensor) -> Two:
    if isinstance(made, torch.Tensor):
        channels = inputs.weights.weight.shape[0]
        return made, x.new_zeros((x.shape[0], channels, 2), dtype=wide_of(x))
    y, norm = made
    return y.contiguous(), norm.contiguous()


_FUSED = "Tensor? norm=None, Tensor? shortcut=None, Tensor? shortcut_weight=None, "
CONV = TorchOp(
    "conv",
    f'(Tensor x, Tensor weight, Tensor? bias=None, str kind="3x3", {_FUSED}'
    "Tensor? embedding=None) -> Tensor",
    _posed,
    _y_empty,
    _y,
    partial(_posed, weights=KEPT),
)
CONV_AND_NORM = TorchOp(
    "conv_and_norm",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor gamma, Tensor beta, int groups, "
    f'float eps=1e-5, str kind="3x3", {_FUSED}Tensor? embedding=None) -> (Tensor, Tensor)',
    _posed_with_norm,
    _y_empty,
    _both,
    partial(_posed_with_norm, weights=KEPT),
)


def conv_door(kind: str, inputs: ConvInputs) -> Any:
    """One of the operators, called with the op's inputs; None for what they do not do."""
    x, weights, norm, shortcut, following, overflow, band, out, _, embedding, _ = inputs
    if not weights.in_rows or any(item is not None for item in (overflow, band, out)):
        return None
    bias = weights.bias if weights.has_bias else None
    fused = (kind, norm, shortcut, inputs.through, embedding)
    if following is None:
        return torch.ops.rocm_sd.conv.default(x, weights.weight, bias, *fused), None
    affine = (following.gamma, following.beta, following.groups, following.eps)
    return torch.ops.rocm_sd.conv_and_norm.default(x, weights.weight, bias, *affine, *fused)
