"""Every operator once: its schema, how it poses an op, its gradients; and the doors to them.

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
from lib_rocm_sd.ops.attention import with_lse
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION, ATTENTION_AND_LSE
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention_backward import kernel
from lib_rocm_sd.ops.attention_backward.inputs import AttentionBackwardInputs
from lib_rocm_sd.ops.attention_backward.op import ATTENTION_BACKWARD
from lib_rocm_sd.ops.base import Op, reasons
from lib_rocm_sd.ops.conv.inputs import ConvInputs, NextNorm
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import ConvProblem, output_shape
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES, DTYPES
from lib_rocm_sd.ops.group_norm.formula import wide_of
from lib_rocm_sd.ops.group_norm.inputs import GroupNormInputs, NormInputs
from lib_rocm_sd.ops.group_norm.op import GROUP_NORM_SILU, NORM
from lib_rocm_sd.ops.group_norm.problem import NormProblem
from lib_rocm_sd.ops.group_norm_backward.inputs import GroupNormBackwardInputs
from lib_rocm_sd.ops.group_norm_backward.op import GROUP_NORM_BACKWARD
from lib_rocm_sd.ops.keys import described
from lib_rocm_sd.ops.layer_norm.inputs import LayerNormInputs
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM
from lib_rocm_sd.ops.layer_norm_backward.inputs import LayerNormBackwardInputs
from lib_rocm_sd.ops.layer_norm_backward.op import LAYER_NORM_BACKWARD
from lib_rocm_sd.ops.linear.inputs import LinearInputs, inputs_of
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.torch_ops.register import Posed, TorchOp
from lib_rocm_sd.torch_ops.weights import KeptWeights

Tensor = torch.Tensor
Optional = torch.Tensor | None
Gradients = list[Optional]
Two = tuple[Tensor, Tensor]
Three = tuple[Tensor, Tensor, Tensor]


def _posing(op: Op[Any, Any], inputs: Callable[..., Any]) -> Callable[..., Posed]:
    """For an op whose inputs are the operator's arguments, in their order."""
    return lambda *arguments: (op, inputs(*arguments))


def _empty(op: Op[Any, Any]) -> Callable[[Any, Any], Tensor]:
    return lambda problem, inputs: inputs[0].new_empty(op.output_shape(problem))


def _dense(output: Any, inputs: Any, x: Tensor) -> Tensor:
    """The result of an op that gives one tensor."""
    dense: Tensor = output.contiguous()
    return dense


# Attention.


def _attention_gradients(
    inputs: AttentionInputs,
    results: Sequence[Tensor],
    wanted: Sequence[bool],
    grads: Sequence[Tensor],
) -> Gradients | None:
    """By attention_backward; None where a mask's gradient is wanted too, or a gradient's, which
    that has not, or no log-sum-exp was kept.
    """
    output, *lse = results
    if not lse or any(wanted[3:]) or torch.is_grad_enabled():
        return None
    q, k, v, mask, scale = inputs[:5]
    backward = torch.ops.rocm_sd.attention_backward.default
    found = backward(q, k, v, output, *grads, *lse, mask, scale)
    return [item if want else None for item, want in zip(found, wanted, strict=False)]


def _attention_followed(
    q: Tensor, k: Tensor, v: Tensor, mask: Optional = None, scale: float | None = None
) -> tuple[Tensor, ...] | None:
    """With the log-sum-exp, where kernels of ours may make the gradients; torch's would not read
    it.
    """
    known = isinstance(q, Tensor) and q.ndim == 4 and identify(q.device).arch is not None
    if not known or DTYPE_NAMES.get(q.dtype) not in kernel.DTYPES:
        return None
    if kernel.head_dim_refusals(q.shape[3]) or wanted((mask,)):
        return None
    both: Two = torch.ops.rocm_sd.attention_and_lse.default(q, k, v, mask, scale)
    return both


def _lse_empty(problem: AttentionProblem, inputs: AttentionInputs) -> with_lse.Both:
    q = inputs.q
    lse = q.new_empty(with_lse.lse_shape(problem), dtype=with_lse.wide(q.dtype))
    return q.new_empty(ATTENTION.output_shape(problem)), lse


def _output_and_lse(output: Any, inputs: AttentionInputs, x: Tensor) -> with_lse.Both:
    y, lse = with_lse.given(output, ATTENTION_AND_LSE.problem_of(inputs), inputs.q)
    return y.contiguous(), lse.contiguous()


def _of_q_k_v(output: Any, inputs: AttentionBackwardInputs, x: Tensor) -> Three:
    """Three gradients; for an input without elements the op gives one tensor."""
    if isinstance(output, Tensor):
        output = [t.new_zeros(t.shape) for t in inputs[:3]]
    q, k, v = (t.contiguous() for t in output)
    return q, k, v


ATTEND = TorchOp(
    "attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? mask=None, float? scale=None) -> Tensor",
    _posing(ATTENTION, AttentionInputs),
    _empty(ATTENTION),
    _dense,
    backward=_attention_gradients,
    keeps=True,
    followed=_attention_followed,
)
AND_LSE = TorchOp(
    "attention_and_lse",
    "(Tensor q, Tensor k, Tensor v, Tensor? mask=None, float? scale=None) -> (Tensor, Tensor)",
    _posing(ATTENTION_AND_LSE, AttentionInputs),
    _lse_empty,
    _output_and_lse,
)
BACKWARD = TorchOp(
    "attention_backward",
    "(Tensor q, Tensor k, Tensor v, Tensor output, Tensor grad, Tensor lse, Tensor? mask=None, "
    "float? scale=None) -> (Tensor, Tensor, Tensor)",
    _posing(ATTENTION_BACKWARD, AttentionBackwardInputs),
    lambda problem, inputs: tuple(t.new_empty(t.shape) for t in inputs[:3]),
    _of_q_k_v,
)


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
        held = weights(weight, bias)
    except ValueError as error:
        raise ValueError(f"{error}, {described(x=x)}") from None
    inputs = ConvInputs(
        *(x, held, norm, shortcut, following, None, None, None, finish),
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
    *fused: Optional,
    weights: Weights = _fresh,
) -> Posed:
    """`fused`: norm, shortcut, shortcut_weight and embedding."""
    following = NextNorm(gamma, beta, groups, eps)
    return _conv(x, weight, bias, kind, *fused, weights=weights, following=following)


def _y_empty(problem: ConvProblem, inputs: ConvInputs) -> Two:
    """y and a norm, which `conv` does not give."""
    x = inputs.x
    norm = x.new_empty((problem.batch, problem.out_channels, 2), dtype=wide_of(x))
    return x.new_empty(output_shape(problem)), norm


def _y(output: Any, inputs: ConvInputs, x: Tensor) -> Tensor:
    """The result y; for an x without elements the op gives it alone."""
    y: Tensor = output if isinstance(output, Tensor) else output[0]
    return y.contiguous()


def _y_and_norm(output: Any, inputs: ConvInputs, x: Tensor) -> Two:
    if isinstance(output, Tensor):
        channels = inputs.weights.weight.shape[0]
        return output, x.new_zeros((x.shape[0], channels, 2), dtype=wide_of(x))
    y, norm = output
    return y.contiguous(), norm.contiguous()


_FUSED = (
    'str kind="3x3", Tensor? norm=None, Tensor? shortcut=None, Tensor? shortcut_weight=None, '
    "Tensor? embedding=None"
)
CONV = TorchOp(
    "conv",
    f"(Tensor x, Tensor weight, Tensor? bias=None, {_FUSED}) -> Tensor",
    _conv,
    _y_empty,
    _y,
    partial(_conv, weights=KEPT),
)
CONV_AND_NORM = TorchOp(
    "conv_and_norm",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor gamma, Tensor beta, int groups, "
    f"float eps=1e-5, {_FUSED}) -> (Tensor, Tensor)",
    _conv_and_norm,
    _y_empty,
    _y_and_norm,
    partial(_conv_and_norm, weights=KEPT),
)


def _conv_door(kind: str, inputs: ConvInputs) -> Any:
    """None for what the operators do not do."""
    x, weights, norm, shortcut, following, overflow, band, out, _, embedding, _ = inputs
    if not weights.in_rows or any(item is not None for item in (overflow, band, out)):
        return None
    bias = weights.bias if weights.has_bias else None
    fused = (kind, norm, shortcut, inputs.through, embedding)
    if following is None:
        return torch.ops.rocm_sd.conv.default(x, weights.weight, bias, *fused), None
    affine = (following.gamma, following.beta, following.groups, following.eps)
    return torch.ops.rocm_sd.conv_and_norm.default(x, weights.weight, bias, *affine, *fused)


# Norms. Of gradients that are not wanted, an operator gives tensors without elements.


def _affine_empty(problem: Any, inputs: Any) -> Two:
    channels, dtype = problem.channels if problem.wanted else 0, DTYPES[problem.affine_dtype]
    of_gamma, of_beta = (inputs.x.new_empty(channels, dtype=dtype) for _ in range(2))
    return of_gamma, of_beta


def _image_empty(problem: Any, inputs: Any) -> Tensor:
    """In the memory format that the op's variants choose."""
    order = torch.channels_last if problem.channels_last else torch.contiguous_format
    return torch.empty_like(inputs.x, memory_format=order)


def _of_x_gamma_beta(output: Any, inputs: Any, grad: Tensor) -> Three:
    """What an op of gradients gives. Of an x without elements it is zeros, of gradients that are
    not wanted None.
    """
    x, images = inputs.x, isinstance(inputs, GroupNormBackwardInputs)
    affine = [inputs.gamma, inputs.beta] if images else [inputs.gamma]
    dtypes = [t.dtype for t in affine if t is not None] or [x.dtype]
    dtype = torch.promote_types(dtypes[0], dtypes[-1])
    channels = x.shape[1 if images else -1] if inputs.affine else 0
    of_x, *others = (output, None, None) if isinstance(output, Tensor) else output
    found = [x.new_zeros(channels, dtype=dtype) if each is None else each for each in others]
    return of_x, found[0].contiguous(), found[1].contiguous()


def _chosen(made: Sequence[Tensor], of: Sequence[Optional], wanted: Sequence[bool]) -> Gradients:
    """Each that is wanted, in the dtype of what it is the gradient of."""
    return [
        each.to(tensor.dtype) if want and tensor is not None else None
        for each, tensor, want in zip(made, of, wanted, strict=False)
    ]


def _silu_gradients(
    inputs: GroupNormInputs,
    results: Sequence[Tensor],
    wanted: Sequence[bool],
    grads: Sequence[Tensor],
) -> Gradients:
    x, gamma, beta, *rest = inputs[:6]
    made = torch.ops.rocm_sd.group_norm_silu_backward.default(
        *(grads[0], x, gamma, beta, *rest, any(wanted[1:3]))
    )
    return _chosen(made, (x, gamma, beta), wanted)


def _layer_norm_gradients(
    inputs: LayerNormInputs,
    results: Sequence[Tensor],
    wanted: Sequence[bool],
    grads: Sequence[Tensor],
) -> Gradients:
    x, gamma, beta, eps, _ = inputs
    made = torch.ops.rocm_sd.layer_norm_backward.default(grads[0], x, gamma, eps, any(wanted[1:3]))
    return _chosen(made, (x, gamma, beta), wanted)


def _added_gradients(
    inputs: LayerNormInputs,
    results: Sequence[Tensor],
    wanted: Sequence[bool],
    grads: Sequence[Tensor],
) -> Gradients:
    x, gamma, beta, eps, added = inputs
    made = torch.ops.rocm_sd.layer_norm_added_backward.default(
        *(*grads, x, added, gamma, eps, any(wanted[2:4]))
    )
    of_x, *others = _chosen(made, (x, gamma, beta), (any(wanted[:2]), *wanted[2:4]))
    return [of_x if wanted[0] else None, of_x if wanted[1] else None, *others]


def _norm_of(x: Tensor, gamma: Optional, beta: Optional, groups: int, eps: float = 1e-5) -> Posed:
    """Pose the norm of x (N, H, W, C), the layout that convolutions take."""
    if x.ndim != 4:
        raise ValueError(f"x must be (N, H, W, C): {described(x=x)}")
    return NORM, NormInputs(x.permute(0, 3, 1, 2), gamma, beta, groups, eps)


def _norm_empty(problem: NormProblem, inputs: NormInputs) -> Tensor:
    x = inputs.x
    return x.new_empty((problem.batch, problem.channels, 2), dtype=wide_of(x))


def _norm_and_sum(output: Any, inputs: LayerNormInputs, x: Tensor) -> Two:
    """Two tensors; for an x without elements the op gives one."""
    return (output, output.clone()) if isinstance(output, Tensor) else output


def _added(x: Tensor, added: Tensor, gamma: Optional, beta: Optional, eps: float = 1e-5) -> Posed:
    return LAYER_NORM, LayerNormInputs(x, gamma, beta, eps, added)


def _added_backward(
    grad: Tensor,
    sum_grad: Tensor,
    x: Tensor,
    added: Tensor,
    gamma: Optional,
    eps: float = 1e-5,
    affine: bool = True,
) -> Posed:
    inputs = LayerNormBackwardInputs(grad, x, gamma, eps, added, sum_grad, affine)
    return LAYER_NORM_BACKWARD, inputs


def _layer_norm_backward(
    grad: Tensor, x: Tensor, gamma: Optional, eps: float = 1e-5, affine: bool = True
) -> Posed:
    return LAYER_NORM_BACKWARD, LayerNormBackwardInputs(grad, x, gamma, eps, affine=affine)


_THREE = "(Tensor, Tensor, Tensor)"
_AFFINE = "Tensor? gamma, Tensor? beta"
NORMS = (
    TorchOp(
        "group_norm_of",
        f"(Tensor x, {_AFFINE}, int groups, float eps=1e-5) -> Tensor",
        _norm_of,
        _norm_empty,
        _dense,
    ),
    TorchOp(
        "group_norm_silu",
        f"(Tensor x, {_AFFINE}, int groups, float eps=1e-5, bool silu=True) -> Tensor",
        lambda x, gamma, beta, groups, eps=1e-5, silu=True: (
            GROUP_NORM_SILU,
            GroupNormInputs(x, gamma, beta, groups, eps, silu),
        ),
        _image_empty,
        lambda output, inputs, x: output,
        backward=_silu_gradients,
    ),
    TorchOp(
        "layer_norm",
        f"(Tensor x, {_AFFINE}, float eps=1e-5) -> Tensor",
        lambda x, gamma, beta, eps=1e-5: (LAYER_NORM, LayerNormInputs(x, gamma, beta, eps)),
        _empty(LAYER_NORM),
        _dense,
        backward=_layer_norm_gradients,
    ),
    TorchOp(
        "layer_norm_added",
        f"(Tensor x, Tensor added, {_AFFINE}, float eps=1e-5) -> (Tensor, Tensor)",
        _added,
        lambda problem, inputs: tuple(inputs.x.new_empty(problem.shape) for _ in range(2)),
        _norm_and_sum,
        backward=_added_gradients,
    ),
    TorchOp(
        "layer_norm_backward",
        "(Tensor grad, Tensor x, Tensor? gamma, float eps=1e-5, bool affine=True) -> " + _THREE,
        _layer_norm_backward,
        lambda problem, inputs: (
            inputs.x.new_empty(problem.shape),
            *_affine_empty(problem, inputs),
        ),
        _of_x_gamma_beta,
    ),
    TorchOp(
        "layer_norm_added_backward",
        "(Tensor grad, Tensor sum_grad, Tensor x, Tensor added, Tensor? gamma, float eps=1e-5, "
        "bool affine=True) -> " + _THREE,
        _added_backward,
        lambda problem, inputs: (
            inputs.x.new_empty(problem.shape),
            *_affine_empty(problem, inputs),
        ),
        _of_x_gamma_beta,
    ),
    TorchOp(
        "group_norm_silu_backward",
        f"(Tensor grad, Tensor x, {_AFFINE}, int groups, float eps=1e-5, bool silu=True, "
        "bool affine=True) -> " + _THREE,
        lambda grad, x, gamma, beta, groups, eps=1e-5, silu=True, affine=True: (
            GROUP_NORM_BACKWARD,
            GroupNormBackwardInputs(grad, x, gamma, beta, groups, eps, silu, affine),
        ),
        lambda problem, inputs: (_image_empty(problem, inputs), *_affine_empty(problem, inputs)),
        _of_x_gamma_beta,
    ),
)


def _silu_door(inputs: GroupNormInputs) -> Any:
    """None where something is added, of which the operator knows nothing."""
    if inputs.added is not None:
        return None
    return torch.ops.rocm_sd.group_norm_silu.default(*inputs[:6])


def _norm_door(inputs: NormInputs) -> Any:
    x, *others = inputs
    return torch.ops.rocm_sd.group_norm_of.default(x.permute(0, 2, 3, 1), *others)


def _layer_norm_door(inputs: LayerNormInputs) -> Any:
    x, gamma, beta, eps, added = inputs
    if added is None:
        return torch.ops.rocm_sd.layer_norm.default(x, gamma, beta, eps)
    return torch.ops.rocm_sd.layer_norm_added.default(x, added, gamma, beta, eps)


def _layer_norm_backward_door(inputs: LayerNormBackwardInputs) -> Any:
    grad, x, gamma, eps, added, sum_grad, affine = inputs
    operators, rest = torch.ops.rocm_sd, (gamma, eps, affine)
    if added is None:
        made = operators.layer_norm_backward.default(grad, x, *rest)
    else:
        made = operators.layer_norm_added_backward.default(grad, sum_grad, x, added, *rest)
    return made if affine else (made[0], None, None)


def _group_norm_backward_door(inputs: GroupNormBackwardInputs) -> Any:
    made = torch.ops.rocm_sd.group_norm_silu_backward.default(*inputs)
    return made if inputs.affine else (made[0], None, None)


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
        told = described(**given, weight_2=weight_2, bias_2=bias_2)
        raise ValueError(f"{'; '.join(lacking)}: {told}")
    layers = [(weight, bias)]
    layers += [(w, b) for w, b in ((weight_1, bias_1), (weight_2, bias_2)) if w is not None]
    weights, biases = zip(*layers, strict=True)
    return LINEAR, inputs_of(x, weights, biases, residual, gate, None)


LINEAR_ROWS = TorchOp(
    "linear",
    "(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None, bool gate=False, "
    "Tensor? weight_1=None, Tensor? bias_1=None, Tensor? weight_2=None, Tensor? bias_2=None) "
    "-> Tensor",
    _linear,
    _empty(LINEAR),
    # (rows, columns) as x has its rows
    lambda output, inputs, x: output.contiguous().view(*x.shape[:-1], output.shape[1]),
)


def _linear_door(inputs: LinearInputs) -> Tensor:
    """Several calls for more weights than the operator has names for. What is to be written over
    is written after.
    """
    x, weight, bias, residual, out, *others, gate, more = inputs
    operator = torch.ops.rocm_sd.linear.default
    if not more:
        made: Tensor = operator(x, weight, bias, residual, gate, *others)
    else:
        flat = (weight, bias, *others, *more)
        parts = [operator(x, w, b) for w, b in zip(flat[::2], flat[1::2], strict=True)]
        made = torch.cat(parts, 1)
        made = made if residual is None else made + residual
    return made if out is None else out.copy_(made)


OPS: tuple[TorchOp, ...] = (ATTEND, AND_LSE, BACKWARD, CONV, CONV_AND_NORM, *NORMS, LINEAR_ROWS)
DOORS: dict[str, Callable[[Any], Any]] = {
    ATTENTION.name: lambda inputs: torch.ops.rocm_sd.attention.default(*inputs),
    ATTENTION_AND_LSE.name: lambda inputs: torch.ops.rocm_sd.attention_and_lse.default(*inputs),
    ATTENTION_BACKWARD.name: lambda inputs: torch.ops.rocm_sd.attention_backward.default(*inputs),
    GROUP_NORM_SILU.name: _silu_door,
    NORM.name: _norm_door,
    LAYER_NORM.name: _layer_norm_door,
    LINEAR.name: _linear_door,
    LAYER_NORM_BACKWARD.name: _layer_norm_backward_door,
    GROUP_NORM_BACKWARD.name: _group_norm_backward_door,
    **{op.name: partial(_conv_door, kind) for kind, op in CONVS.items()},
}
"""By the name of an op of ops/. The other ops of group norm are steps of these."""
