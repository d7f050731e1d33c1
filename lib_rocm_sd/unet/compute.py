"""All that the blocks of a UNet compute, by the signatures of functional.py.

Convolutions are torch's here. On the CPU they are computed in float32 and rounded once, as our
kernels do; on a GPU torch's own kernels compute them in half precision, and what is added is added
by operations of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch user knows

from lib_rocm_sd import functional
from lib_rocm_sd.engine.session import DEFAULT, Session
from lib_rocm_sd.ops.conv.problem import NextNorm
from lib_rocm_sd.ops.conv.torch import no_search
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.ops.keys import described
from lib_rocm_sd.ops.linear import kernel as linear_kernel

MOST_WEIGHTS = linear_kernel.MOST_WEIGHTS
"""So many `linear` takes in one call."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _by_itself(function: _Function) -> _Function:
    """Without autocast, which would choose other dtypes for some of the operations."""

    @wraps(function)
    def plain(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _autocasts():
            return function(x, *args, **kwargs)
        with torch.autocast(x.device.type, enabled=False):
            return function(x, *args, **kwargs)

    return plain  # type: ignore[return-value]


def _autocasts_before_2_4() -> bool:
    return torch.is_autocast_enabled() or torch.is_autocast_cpu_enabled()


_autocasts: Callable[[], bool] = getattr(
    torch._C, "_is_any_autocast_enabled", _autocasts_before_2_4
)


@_by_itself
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, session: Session = DEFAULT
) -> torch.Tensor:
    """As functional.attention, without a mask, scaled by head_dim ** -0.5."""
    return functional.attention(q, k, v, session=session)


@_by_itself
def group_norm(
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
    session: Session = DEFAULT,
) -> torch.Tensor:
    """GroupNorm of x (N, H, W, C), then SiLU if wanted; like x."""
    planes = x.permute(0, 3, 1, 2)
    made = functional.group_norm_silu(planes, gamma, beta, groups, eps, silu, session)
    return made.permute(0, 2, 3, 1)


@_by_itself
def norm_of(x: torch.Tensor, norm: NextNorm, session: Session = DEFAULT) -> torch.Tensor:
    """The norm (N, C, 2) of x (N, H, W, C), for `conv`."""
    return functional.group_norm_of(x, norm.gamma, norm.beta, norm.groups, norm.eps, session)


@_by_itself
def linear(
    x: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    bias: Any = None,
    residual: torch.Tensor | None = None,
    gate: bool = False,
    session: Session = DEFAULT,
) -> torch.Tensor:
    """As functional.linear."""
    return functional.linear(x, weight, bias, residual, gate, session)


@_by_itself
def layer_norm(
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    eps: float = 1e-5,
    added: torch.Tensor | None = None,
    session: Session = DEFAULT,
) -> Any:
    """As functional.layer_norm."""
    return functional.layer_norm(x, gamma, beta, eps, added, session)


@_by_itself
def conv(
    x: torch.Tensor,
    weights: ConvWeights,
    norm: torch.Tensor | None = None,
    shortcut: torch.Tensor | None = None,
    shortcut_weight: torch.Tensor | None = None,
    next_norm: NextNorm | None = None,
    embedding: torch.Tensor | None = None,
    session: Session = DEFAULT,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The 3x3 convolution of x (N, H, W, Ci): y (N, H, W, Co), and its norm for `next_norm`.

    `norm` (N, Ci, 2): x is normalised by it and SiLU'd first. `shortcut` (N, H, W, Cs) is added,
    multiplied by `shortcut_weight` (Co, Cs) where there is one; its bias is in `weights`.
    `embedding` (N, Co), whose rows may lie in longer ones, is added to each pixel of its image.
    """
    if norm is not None:
        x = functional.group_norm_apply(x, norm, True, session)
    if shortcut is not None and shortcut_weight is not None:
        shortcut = F.linear(_widened(shortcut), shortcut_weight.to(_widened(shortcut)))
    y = _convolved(x, weights, shortcut, embedding, 1)
    if next_norm is None:
        return y, None
    return y, norm_of(y, next_norm, session)


@_by_itself
def upsample(x: torch.Tensor, weights: ConvWeights, session: Session = DEFAULT) -> torch.Tensor:
    """The 3x3 convolution of x (N, H, W, C) enlarged by nearest: (N, 2H, 2W, Co)."""
    planes = F.interpolate(x.permute(0, 3, 1, 2), scale_factor=2.0, mode="nearest")
    return _convolved(planes.permute(0, 2, 3, 1), weights, None, None, 1)


@_by_itself
def downsample(x: torch.Tensor, weights: ConvWeights, session: Session = DEFAULT) -> torch.Tensor:
    """The 3x3 convolution of x (N, H, W, C) in steps of two pixels, padded on all sides by one."""
    return _convolved(x, weights, None, None, 2)


def _convolved(
    x: torch.Tensor,
    weights: ConvWeights,
    shortcut: torch.Tensor | None,
    embedding: torch.Tensor | None,
    stride: int,
) -> torch.Tensor:
    weight, bias, _ = weights.plain(x)
    if weights.weight.dtype != x.dtype or weights.weight.device != x.device:
        raise ValueError(f"of several dtypes or devices: {described(x=x, weight=weights.weight)}")
    wide = _widened(x.permute(0, 3, 1, 2))
    bias = weights.bias_on(x.device) if wide.dtype != x.dtype else bias
    with no_search():
        y = F.conv2d(wide, weight.to(wide), bias, stride=stride, padding=1).permute(0, 2, 3, 1)
    if embedding is not None:
        y = y + embedding.to(y.dtype)[:, None, None]
    if shortcut is not None:
        y = y + shortcut
    return y.to(x.dtype).contiguous()


def _widened(x: torch.Tensor) -> torch.Tensor:
    """Half precision in float32 on the CPU, else x."""
    return x.float() if x.device.type == "cpu" and x.dtype.itemsize == 2 else x
