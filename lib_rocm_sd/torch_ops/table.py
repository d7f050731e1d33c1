"""Every operator once: how it poses an op, its gradients; and the doors to them.

A door calls an operator with the inputs of the op that it is for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from lib_rocm_sd.device import identify
from lib_rocm_sd.followed import wanted
from lib_rocm_sd.functional import group_norm_finalize
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION, ATTENTION_AND_LSE
from lib_rocm_sd.ops.attention_backward import kernel
from lib_rocm_sd.ops.attention_backward.inputs import AttentionBackwardInputs
from lib_rocm_sd.ops.attention_backward.op import ATTENTION_BACKWARD
from lib_rocm_sd.ops.base import reasons
from lib_rocm_sd.ops.conv.inputs import ConvInputs, NextNorm
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES
from lib_rocm_sd.ops.gradients import NormGradients
from lib_rocm_sd.ops.group_norm.inputs import GroupNormInputs, NormInputs
from lib_rocm_sd.ops.group_norm.op import GROUP_NORM_SILU, NORM
from lib_rocm_sd.ops.group_norm_backward.inputs import GroupNormBackwardInputs
from lib_rocm_sd.ops.group_norm_backward.op import GROUP_NORM_BACKWARD
from lib_rocm_sd.ops.keys import described
from lib_rocm_sd.ops.layer_norm.inputs import LayerNormInputs
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM
from lib_rocm_sd.ops.layer_norm_backward.inputs import LayerNormBackwardInputs
from lib_rocm_sd.ops.layer_norm_backward.op import LAYER_NORM_BACKWARD
from lib_rocm_sd.ops.linear.inputs import LinearInputs, inputs_of
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.torch_ops.register import BackwardCall, Fields, Posed, TorchOp
from lib_rocm_sd.torch_ops.weights import KeptWeights

Tensor = torch.Tensor
Optional = torch.Tensor | None
Gradients = list[Optional]
Two = tuple[Tensor, Tensor]


# Attention.


def _attention_gradients(asked: BackwardCall) -> Gradients | None:
    """By attention_backward; None where a mask's gradient is wanted too, or a gradient's, which
    that has not, or no log-sum-exp was kept.
    """
    output, *lse = asked.results
    if not lse or any(asked.wanted[3:]) or torch.is_grad_enabled():
        return None
    q, k, v, mask, scale = asked.inputs
    backward = torch.ops.rocm_sd.attention_backward.default
    three = backward(q, k, v, output, *asked.grads, *lse, mask, scale)
    return [item if want else None for item, want in zip(three, asked.wanted, strict=False)]


def _attention_followed(
    q: Tensor, k: Tensor, v: Tensor, mask: Optional = None, scale: float | None = None
) -> Two | None:
    """With the log-sum-exp, where kernels of ours may make the gradients; torch's would not read
    it.
    """
    has_row = isinstance(q, Tensor) and q.ndim == 4 and identify(q.device).arch is not None
    if not has_row or DTYPE_NAMES.get(q.dtype) not in kernel.DTYPES:
        return None
    if kernel.head_dim_refusals(q.shape[3]) or wanted((mask,)):
        return None
    return torch.ops.rocm_sd.attention_and_lse.default(q, k, v, mask, scale)


ATTEND = TorchOp(
    "attention",
    Fields(ATTENTION, AttentionInputs),
    backward=_attention_gradients,
    keeps=True,
    followed=_attention_followed,
)
AND_LSE = TorchOp("attention_and_lse", Fields(ATTENTION_AND_LSE, AttentionInputs), 2)
BACKWARD = TorchOp("attention_backward", Fields(ATTENTION_BACKWARD, AttentionBackwardInputs), 3)


# Convolutions. Channels-last weights (Co, Ci, 3, 3) are read from their own memory; of others a
# copy is kept.

Weights = Callable[[Tensor, Optional], ConvWeights]
_fresh: Weights = partial(ConvWeights, in_rows=True)
KEPT = KeptWeights()


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Optional = None,
    kind: str = "3x3",
    norm: Optional = None,
    shortcut: Optional = None,
    shortcut_weight: Optional = None,
    embedding: Optional = None,
    *,
    weights: Weights = _fresh,
    following: NextNorm | None = None,
) -> Posed:
    if kind not in CONVS:
        raise ValueError(f"kind {kind} is none of {', '.join(CONVS)}")
    finish = group_norm_finalize if following is not None and weights is not _fresh else None
    try:
        ready = weights(weight, bias)
    except ValueError as error:
        raise ValueError(f"{error}, {described(x=x)}") from None
    inputs = ConvInputs(
        *(x, ready, norm, shortcut, following, None, None, None, finish),
        *(embedding, shortcut_weight),
    )
    return CONVS[kind], inputs


def _conv_and_norm(
    x: Tensor,
    weight: Tensor,
    bias: Optional,
    gamma: Tensor,
    beta: Tensor,
    groups: int,
    eps: float = 1e-5,
    kind: str = "3x3",
    norm: Optional = None,
    shortcut: Optional = None,
    shortcut_weight: Optional = None,
    embedding: Optional = None,
    *,
    weights: Weights = _fresh,
) -> Posed:
    fused = (norm, shortcut, shortcut_weight, embedding)
    following = NextNorm(gamma, beta, groups, eps)
    return _conv(x, weight, bias, kind, *fused, weights=weights, following=following)


CONV = TorchOp(
    "conv",
    _conv,
    result=lambda made, x: made[0].contiguous(),
    kept=partial(_conv, weights=KEPT),
)
CONV_AND_NORM = TorchOp(
    "conv_and_norm", _conv_and_norm, 2, kept=partial(_conv_and_norm, weights=KEPT)
)


def _conv_door(kind: str, inputs: ConvInputs) -> Any:
    """None for what the operators do not do."""
    x, weights, norm, shortcut, following, overflow, band, out, _, embedding, _, *more = inputs
    if not weights.in_rows or any(item is not None for item in (overflow, band, out, *more)):
        return None
    bias = weights.bias if weights.has_bias else None
    fused = (kind, norm, shortcut, inputs.through, embedding)
    if following is None:
        return torch.ops.rocm_sd.conv.default(x, weights.weight, bias, *fused), None
    affine = (following.gamma, following.beta, following.groups, following.eps)
    return torch.ops.rocm_sd.conv_and_norm.default(x, weights.weight, bias, *affine, *fused)


# Norms. Of gradients that are not wanted, an operator gives tensors without elements.


def _of_x_gamma_beta(made: NormGradients, grad: Tensor) -> tuple[Tensor, ...]:
    of_x, *affine = made
    return of_x, *(grad.new_empty(0) if t is None else t.contiguous() for t in affine)


def _chosen(made: Sequence[Tensor], of: Sequence[Optional], wanted: Sequence[bool]) -> Gradients:
    """Each that is wanted, in the dtype of what it is the gradient of."""
    return [
        each.to(tensor.dtype) if want and tensor is not None else None
        for each, tensor, want in zip(made, of, wanted, strict=False)
    ]


def _silu_gradients(asked: BackwardCall) -> Gradients:
    inputs, _, wanted, grads = asked
    backward = torch.ops.rocm_sd.group_norm_silu_backward.default
    return _chosen(backward(grads[0], *inputs[:6], any(wanted[1:3])), inputs[:3], wanted)


def _layer_norm_gradients(asked: BackwardCall) -> Gradients:
    inputs, _, wanted, grads = asked
    x, gamma, _, eps, _ = inputs
    gradients = torch.ops.rocm_sd.layer_norm_backward.default(
        grads[0], x, gamma, eps, any(wanted[1:3])
    )
    return _chosen(gradients, inputs[:3], wanted)


def _added_gradients(asked: BackwardCall) -> Gradients:
    inputs, _, wanted, grads = asked
    x, gamma, _, eps, added = inputs
    gradients = torch.ops.rocm_sd.layer_norm_added_backward.default(
        *(*grads, x, added, gamma, eps, any(wanted[2:4]))
    )
    of_x, *others = _chosen(gradients, inputs[:3], (any(wanted[:2]), *wanted[2:4]))
    return [of_x if wanted[0] else None, of_x if wanted[1] else None, *others]


def _norm_of(x: Tensor, gamma: Optional, beta: Optional, groups: int, eps: float = 1e-5) -> Posed:
    """Pose the norm of x (N, H, W, C), the layout that convolutions take."""
    if x.ndim != 4:
        raise ValueError(f"x must be (N, H, W, C): {described(x=x)}")
    return NORM, NormInputs(x.permute(0, 3, 1, 2), gamma, beta, groups, eps)


_norm = partial(Fields, LAYER_NORM, LayerNormInputs)
_backward = partial(Fields, LAYER_NORM_BACKWARD, LayerNormBackwardInputs)
NORM_OF = TorchOp("group_norm_of", _norm_of)
SILU = TorchOp(
    "group_norm_silu",
    Fields(GROUP_NORM_SILU, GroupNormInputs, *("x", "gamma", "beta", "groups", "eps", "silu")),
    result=lambda made, x: made,
    backward=_silu_gradients,
)
NORMED = TorchOp("layer_norm", _norm("x", "gamma", "beta", "eps"), backward=_layer_norm_gradients)
ADDED = TorchOp(
    "layer_norm_added", _norm("x", "added", "gamma", "beta", "eps"), 2, backward=_added_gradients
)
NORMED_BACKWARD = TorchOp(
    "layer_norm_backward", _backward("grad", "x", "gamma", "eps", "affine"), 3, _of_x_gamma_beta
)
ADDED_BACKWARD = TorchOp(
    "layer_norm_added_backward",
    _backward("grad", "sum_grad", "x", "added", "gamma", "eps", "affine"),
    *(3, _of_x_gamma_beta),
)
SILU_BACKWARD = TorchOp(
    "group_norm_silu_backward",
    Fields(GROUP_NORM_BACKWARD, GroupNormBackwardInputs),
    *(3, _of_x_gamma_beta),
)


def _norm_door(inputs: NormInputs) -> Any:
    x, *others = inputs
    return torch.ops.rocm_sd.group_norm_of.default(x.permute(0, 2, 3, 1), *others)


# Linear layers.


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Optional = None,
    residual: Optional = None,
    gate: bool = False,
    weight_1: Optional = None,
    bias_1: Optional = None,
    weight_2: Optional = None,
    bias_2: Optional = None,
) -> Posed:
    """Weights and biases one by one, for a list of tensors costs each call more."""
    lacking = reasons(
        (bias_1 is not None and weight_1 is None, "bias_1 without weight_1"),
        (bias_2 is not None and weight_2 is None, "bias_2 without weight_2"),
        (weight_2 is not None and weight_1 is None, "weight_2 without weight_1"),
    )
    if lacking:
        given = dict(x=x, weight=weight, weight_1=weight_1, bias_1=bias_1)
        shapes = described(**given, weight_2=weight_2, bias_2=bias_2)
        raise ValueError(f"{'; '.join(lacking)}: {shapes}")
    layers = [(weight, bias)]
    layers += [(w, b) for w, b in ((weight_1, bias_1), (weight_2, bias_2)) if w is not None]
    weights, biases = zip(*layers, strict=True)
    return LINEAR, inputs_of(x, weights, biases, residual, gate, None)


LINEAR_ROWS = TorchOp(
    "linear",
    _linear,
    # (rows, columns) as x has its rows
    result=lambda made, x: made.contiguous().view(*x.shape[:-1], made.shape[1]),
)


def _linear_door(inputs: LinearInputs) -> Tensor:
    """Several calls for more weights than the operator has names for. What is to be written over
    is written after.
    """
    x, weight, bias, residual, out, *others, gate, more = inputs
    operator = torch.ops.rocm_sd.linear.default
    if not more:
        product: Tensor = operator(x, weight, bias, residual, gate, *others)
    else:
        flat = (weight, bias, *others, *more)
        parts = [operator(x, w, b) for w, b in zip(flat[::2], flat[1::2], strict=True)]
        product = torch.cat(parts, 1)
        product = product if residual is None else product + residual
    return product if out is None else out.copy_(product)


NORMS = (NORM_OF, SILU, NORMED, ADDED, NORMED_BACKWARD, ADDED_BACKWARD, SILU_BACKWARD)
OPS: tuple[TorchOp, ...] = (ATTEND, AND_LSE, BACKWARD, CONV, CONV_AND_NORM, *NORMS, LINEAR_ROWS)


def _door(*rows: TorchOp) -> Callable[[Any], Any]:
    """By the first of these whose arguments say all that an op is given; None where none does."""

    def door(inputs: Any) -> Any:
        for row in rows:
            arguments = row.posed.arguments(inputs)  # type: ignore[attr-defined]
            if arguments is not None:
                return getattr(torch.ops.rocm_sd, row.name).default(*arguments)
        return None

    return door


def _gradients_door(*rows: TorchOp) -> Callable[[Any], Any]:
    """Gradients that are not wanted are None."""
    door = _door(*rows)

    def chosen(inputs: Any) -> Any:
        gradients = door(inputs)
        return gradients if inputs.affine else (gradients[0], None, None)

    return chosen


DOORS: dict[str, Callable[[Any], Any]] = {
    ATTENTION.name: _door(ATTEND),
    ATTENTION_AND_LSE.name: _door(AND_LSE),
    ATTENTION_BACKWARD.name: _door(BACKWARD),
    GROUP_NORM_SILU.name: _door(SILU),
    NORM.name: _norm_door,
    LAYER_NORM.name: _door(NORMED, ADDED),
    LINEAR.name: _linear_door,
    LAYER_NORM_BACKWARD.name: _gradients_door(NORMED_BACKWARD, ADDED_BACKWARD),
    GROUP_NORM_BACKWARD.name: _gradients_door(SILU_BACKWARD),
    **{op.name: partial(_conv_door, kind) for kind, op in CONVS.items()},
}
"""By the name of an op of ops/. The other ops of group norm are steps of these."""
