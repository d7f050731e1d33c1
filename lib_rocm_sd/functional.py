"""What this library computes: the one door to the engine for hosts, the VAE and everybody else.

A call is checked, planned at its first use, and run by the fastest variant that was found right.
"""

from __future__ import annotations

import torch

from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.ops.conv import layout
from lib_rocm_sd.ops.conv import problem as convs
from lib_rocm_sd.ops.conv.kernel import KINDS
from lib_rocm_sd.ops.conv.op import CONVS, in_place
from lib_rocm_sd.ops.conv.problem import Band, NextNorm
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.ops.group_norm.op import APPLY, FINALIZE, GROUP_NORM_SILU, STATISTICS

Result = tuple[torch.Tensor, "torch.Tensor | None"]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(scale q k^T + mask) v; see Engine.attention."""
    return engine.attention(q, k, v, mask, scale)


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
) -> Result:
    """y (N, Ho, Wo, Co) and, where `next_norm` is given, the norm (N, Co, 2) float32 of y for it.

    Of a `band` there are statistics instead, (N, phases, parts, Co or more, 4): those of all bands,
    put together along `parts` and flattened to (N, phases * parts, ..), give the image's norm.

    `norm` (N, Ci, 2): x is normalised by it and SiLU'd while it is read. `shortcut` (N, Ho, Wo, Cs)
    is added, multiplied by the shortcut weight where there is one. `overflow` (1) int32 is set to 1
    where a value does not fit the dtype. Raises ValueError, with shapes, on a caller's mistake.

    x, shortcut and out may be some channels of an image that has more: layout.pixel_stride says
    what is read and written as it lies; x and shortcut are copied otherwise. `out`
    (N, Ho, Wo, Co padded) gets the result. It may begin where the shortcut begins, with the same
    strides, else must not overlap it or x.
    """
    if kind not in CONVS:
        raise ValueError(f"kind {kind} is none of {', '.join(KINDS)}")
    op = in_place(kind) if layout.is_in_place(shortcut, out) else CONVS[kind]
    if out is not None:
        problem = convs.problem_of(kind, x, weights, norm, shortcut, next_norm, band)
        layout.check_out(out, convs.made_shape(problem, band), x, shortcut)
    result: Result = engine.run(
        op, x, weights.weight, norm, shortcut, weights, next_norm, overflow, band, out
    )
    return result


def group_norm_statistics(x: torch.Tensor) -> torch.Tensor:
    """The statistics (N, parts, C, 4) of x (N, H, W, C); ValueError where x is no image."""
    return engine.run(STATISTICS, _planes(x))


def group_norm_finalize(
    statistics: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    groups: int,
    eps: float,
) -> torch.Tensor:
    """The norm (N, C, 2) from statistics (N, parts, C, 4), gamma and beta (C).

    Channels of the statistics beyond gamma's are ignored; a part with a count of 0 weighs nothing.
    Raises ValueError, with shapes, where these do not go together.
    """
    return engine.run(FINALIZE, statistics, gamma, beta, groups, eps)


def group_norm_of(
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    groups: int,
    eps: float,
) -> torch.Tensor:
    """The norm (N, C, 2) of x (N, H, W, C)."""
    return group_norm_finalize(group_norm_statistics(x), gamma, beta, groups, eps)


def group_norm_apply(x: torch.Tensor, norm: torch.Tensor, silu: bool) -> torch.Tensor:
    """x (N, H, W, C) normalised by `norm` (N, C, 2), then SiLU'd if wanted; like x."""
    return engine.run(APPLY, _planes(x), norm, silu).permute(0, 2, 3, 1)


def group_norm_silu(
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    groups: int,
    eps: float = 1e-5,
    silu: bool = True,
) -> torch.Tensor:
    """GroupNorm of x (N, C, H, W), then SiLU if wanted; in the dtype and memory format of x.

    gamma and beta (C) in any float dtype, or None. Raises ValueError, with all shapes, where these
    do not go together.
    """
    return engine.run(GROUP_NORM_SILU, x, gamma, beta, groups, eps, silu)


def _planes(x: torch.Tensor) -> torch.Tensor:
    """(N, H, W, C) as (N, C, H, W), in the same memory."""
    if x.ndim != 4:
        raise ValueError(f"x must be (N, H, W, C): {tuple(x.shape)}")
    return x.permute(0, 3, 1, 2)
