"""What this library computes: the one door to the engine for hosts, the VAE and everybody else.

A call is checked, planned at its first use, and run by the fastest variant that was found right.
`session` says by which policy, with how much memory, and where it is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from lib_rocm_sd.calls import shielded
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.session import DEFAULT, Session
from lib_rocm_sd.followed import asked, attention_or_torchs
from lib_rocm_sd.ops.attention import with_lse
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION, ATTENTION_AND_LSE
from lib_rocm_sd.ops.attention_backward.inputs import AttentionBackwardInputs, Grads
from lib_rocm_sd.ops.attention_backward.op import ATTENTION_BACKWARD
from lib_rocm_sd.ops.conv import inputs as conv_inputs
from lib_rocm_sd.ops.conv import layout
from lib_rocm_sd.ops.conv import problem as convs
from lib_rocm_sd.ops.conv.inputs import ConvInputs, NextNorm, Result
from lib_rocm_sd.ops.conv.kernel import KINDS
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import Band, Epilogue
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.ops.gradients import NormGradients
from lib_rocm_sd.ops.group_norm.inputs import (
    ApplyInputs,
    FinalizeInputs,
    GroupNormInputs,
    ImageInputs,
    NormInputs,
)
from lib_rocm_sd.ops.group_norm.op import APPLY, FINALIZE, GROUP_NORM_SILU, NORM, STATISTICS
from lib_rocm_sd.ops.group_norm_backward.inputs import GroupNormBackwardInputs
from lib_rocm_sd.ops.group_norm_backward.op import GROUP_NORM_BACKWARD
from lib_rocm_sd.ops.keys import described
from lib_rocm_sd.ops.layer_norm.inputs import LayerNormInputs
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM, RMS_NORM
from lib_rocm_sd.ops.layer_norm.rms import RmsInputs
from lib_rocm_sd.ops.layer_norm_backward.inputs import LayerNormBackwardInputs
from lib_rocm_sd.ops.layer_norm_backward.op import LAYER_NORM_BACKWARD
from lib_rocm_sd.ops.linear.inputs import inputs_of as linear_inputs_of
from lib_rocm_sd.ops.linear.op import LINEAR


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    session: Session = DEFAULT,
) -> torch.Tensor:
    """softmax(scale q k^T + mask) v for q (B, Sq, H, D), k and v (B, Sk, H, D): (B, Sq, H*D).

    Strided views are fine. `mask`: bool (True = attend) or additive, broadcastable to
    (B, H, Sq, Sk); or int32 (B, 1, 1, 1), how many of the first keys count: at least one does.
    `scale`: default D ** -0.5. Raises ValueError when shapes, dtypes or devices do not go together,
    NotSupportedError when no variant is left; "out of memory" is passed on.

    Where gradients are wanted they are those of attention_backward, of a mask or for what our
    kernels refuse torch's. torch.compile makes an operator of it where torch_ops/ was imported.
    """
    inputs = AttentionInputs(q, k, v, mask, scale)
    if torch.is_grad_enabled() and asked(inputs):
        return attention_or_torchs(inputs, session)
    return engine.run(ATTENTION, inputs, session)


def attention_and_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    session: Session = DEFAULT,
) -> with_lse.Both:
    """What `attention` gives, and the log-sum-exp (B, H, Sq) of each query's logits,
    scale q k^T + mask, in base 2: float32, of float64 inputs float64; 0 where all keys are masked,
    infinite where it is beyond 100,000.

    Raises as `attention` does.
    """
    with shielded(q.device):
        return engine.run(ATTENTION_AND_LSE, AttentionInputs(q, k, v, mask, scale), session)


def attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    grad: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    session: Session = DEFAULT,
) -> Grads:
    """The gradients of q, k and v, shaped like these, where `grad` is that of `output`, and
    `output` and `lse` what `attention_and_lse` gave for q, k, v, mask and scale. A mask gets none.

    Raises as `attention` does.
    """
    inputs = AttentionBackwardInputs(q, k, v, output, grad, lse, mask, scale)
    return engine.run(ATTENTION_BACKWARD, inputs, session)


def conv(
    kind: str,
    x: torch.Tensor,
    weights: ConvWeights,
    norm: torch.Tensor | None = None,
    shortcut: torch.Tensor | None = None,
    next_norm: NextNorm | None = None,
    overflow: torch.Tensor | None = None,
    band: Band | None = None,
    out: torch.Tensor | None = None,
    embedding: torch.Tensor | None = None,
    session: Session = DEFAULT,
    shortcut_weight: torch.Tensor | None = None,
    epilogue: Epilogue | None = None,
    second: torch.Tensor | None = None,
) -> Result:
    """y (N, Ho, Wo, Co) and, where `next_norm` is given, the norm (N, Co, 2) float32 of y for it.

    Of a `band` there are statistics instead, (N, phases, parts, Co or more, 4): those of all bands,
    put together along `parts` and flattened to (N, phases * parts, ..), give the image's norm.

    `norm` (N, Ci, 2): x is normalised by it and SiLU'd while it is read. `shortcut` (N, Ho, Wo, Cs)
    is added, multiplied by the shortcut weight where there is one. `overflow` (1) int32 is set to 1
    where a value does not fit the dtype. `embedding` (N, Co), in x's dtype or float32, is added to
    all pixels of its image, as the bias is; in float32 and without a bias it is read as it lies.
    Weights are packed once for our kernels, or, with ConvWeights.in_rows, read as they lie: then x
    has their dtype and channels, any number, and `shortcut_weight` (Co, Cs) may stand beside them.
    `epilogue`: an activation, a scale, and of a `second` image as `shortcut` its addition.
    Raises ValueError, with shapes, on a caller's mistake.

    x, shortcut, second and out may be some channels of an image that has more: layout.pixel_stride
    says what is read and written as it lies; what is read is copied otherwise. `out`
    (N, Ho, Wo, Co padded) gets the result. It may begin where the shortcut or second begins, with
    the same strides, else must not overlap them or x.
    """
    if kind not in CONVS:
        raise ValueError(f"kind {kind} is none of {', '.join(KINDS)}")
    finish = partial(group_norm_finalize, session=session)
    inputs = ConvInputs(
        *(x, weights, norm, shortcut, next_norm, overflow, band, out, finish, embedding),
        *(shortcut_weight, epilogue, second),
    )
    if out is not None:
        problem = conv_inputs.problem_of(kind, inputs)
        for added in (shortcut, second):
            layout.check_out(out, convs.made_shape(problem, band), x, added)
    return engine.run(CONVS[kind], inputs, session)


def group_norm_statistics(x: torch.Tensor, session: Session = DEFAULT) -> torch.Tensor:
    """The statistics (N, parts, C, 4) of x (N, H, W, C); ValueError where x is no image."""
    return engine.run(STATISTICS, ImageInputs(_planes(x)), session)


def group_norm_finalize(
    statistics: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    groups: int,
    eps: float,
    session: Session = DEFAULT,
) -> torch.Tensor:
    """The norm (N, C, 2) from statistics (N, parts, C, 4), gamma and beta (C).

    Channels of the statistics beyond gamma's are ignored; a part with a count of 0 weighs nothing.
    Raises ValueError, with shapes, where these do not go together.
    """
    return engine.run(FINALIZE, FinalizeInputs(statistics, gamma, beta, groups, eps), session)


def group_norm_of(
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    groups: int,
    eps: float,
    session: Session = DEFAULT,
) -> torch.Tensor:
    """The norm (N, C, 2) of x (N, H, W, C)."""
    return engine.run(NORM, NormInputs(_planes(x), gamma, beta, groups, eps), session)


def group_norm_apply(
    x: torch.Tensor, norm: torch.Tensor, silu: bool, session: Session = DEFAULT
) -> torch.Tensor:
    """x (N, H, W, C) normalised by `norm` (N, C, 2), then SiLU'd if wanted; like x."""
    made: torch.Tensor = engine.run(APPLY, ApplyInputs(_planes(x), norm, silu), session)
    return made.permute(0, 2, 3, 1)


def group_norm_silu(
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    groups: int,
    eps: float = 1e-5,
    silu: bool = True,
    session: Session = DEFAULT,
) -> torch.Tensor:
    """GroupNorm of x (N, C, H, W), then SiLU if wanted; in the dtype and memory format of x.

    gamma and beta (C) in any float dtype, or None. Raises ValueError, with all shapes, where these
    do not go together.
    """
    inputs = GroupNormInputs(x, gamma, beta, groups, eps, silu)
    return engine.run(GROUP_NORM_SILU, inputs, session)


def layer_norm(
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    eps: float = 1e-5,
    added: torch.Tensor | None = None,
    session: Session = DEFAULT,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm of x (..., C) over C, contiguous; any strides, fastest where rows are dense.

    With `added`, like x: LayerNorm(s) and s, which is x + added rounded to their dtype. gamma and
    beta (C) in any float dtype, or None. Raises ValueError, with all shapes, where these do not go
    together.
    """
    return engine.run(LAYER_NORM, LayerNormInputs(x, gamma, beta, eps, added), session)


def rms_norm(
    x: torch.Tensor, gamma: torch.Tensor, eps: float, silu: bool, session: Session = DEFAULT
) -> torch.Tensor:
    """x / sqrt(max(mean(x^2), eps)) * gamma over the last dimension of x (..., C), then SiLU if
    wanted; contiguous.

    gamma (C) in any float dtype. Raises ValueError, with all shapes, where it does not go with x.
    """
    made: torch.Tensor = engine.run(RMS_NORM, RmsInputs(x, gamma, eps, silu), session)
    return made


def group_norm_silu_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    groups: int,
    eps: float = 1e-5,
    silu: bool = True,
    affine: bool = True,
    session: Session = DEFAULT,
) -> NormGradients:
    """The gradients of group_norm_silu, of x and, where `affine`, of gamma and beta, else None.

    `grad` is that of its result. Those of gamma and beta are in their dtype, in the wider one where
    they differ. Raises ValueError, with all shapes, where these do not go together.
    """
    inputs = GroupNormBackwardInputs(grad, x, gamma, beta, groups, eps, silu, affine)
    return engine.run(GROUP_NORM_BACKWARD, inputs, session)


def layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    eps: float = 1e-5,
    added: torch.Tensor | None = None,
    sum_grad: torch.Tensor | None = None,
    affine: bool = True,
    session: Session = DEFAULT,
) -> NormGradients:
    """The gradients of layer_norm, of x and, where `affine`, of gamma and beta, else None.

    `grad` is that of the norm, `sum_grad` that of x + `added`: they come with `added`, of which the
    gradient is that of x. Those of gamma and beta are in gamma's dtype, else in x's. Raises
    ValueError, with all shapes, where these do not go together.
    """
    inputs = LayerNormBackwardInputs(grad, x, gamma, eps, added, sum_grad, affine)
    return engine.run(LAYER_NORM_BACKWARD, inputs, session)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    residual: torch.Tensor | None = None,
    gate: bool = False,
    session: Session = DEFAULT,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x weight^T + bias + residual (.., N) for x (.., K) and weight (N, K), rounded once.

    `weight`: as nn.Linear has it, or up to 144 of them, whose columns then lie side by side; a
    bias (N) for each, or None. Rows of x may be apart, as those of a slice are. `residual` (.., N)
    is written over where it is also given as `out`. `gate`: GEGLU, (x Wa^T + ba) * gelu(x Wb^T +
    bb) of a weight (2 N, K), first a's rows, then b's. Raises ValueError, with shapes, where these
    do not go together, or are not of one dtype.
    """
    inputs = linear_inputs_of(x, weight, bias, residual, gate, out)
    made: torch.Tensor = engine.run(LINEAR, inputs, session)
    return out if out is not None else made.reshape(*x.shape[:-1], made.shape[1])


def _planes(x: torch.Tensor) -> torch.Tensor:
    """(N, H, W, C) as (N, C, H, W), in the same memory."""
    if not isinstance(x, torch.Tensor) or x.ndim != 4 or x.layout != torch.strided:
        raise ValueError(f"x must be a dense (N, H, W, C): {described(x=x)}")
    return x.permute(0, 3, 1, 2)
