"""All that the blocks of a UNet compute. `place` names the call among those of its block.

Convolutions are torch's here. On the CPU they are computed in float32 and rounded once, as our
kernels do; on a GPU torch's own kernels compute them in half precision, and what is added is added
by operations of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch user knows
from torch import nn

from lib_rocm_sd.calls import Calls, autocasts
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionInputs
from lib_rocm_sd.ops.conv.torch import no_search
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.ops.group_norm.op import APPLY, FINALIZE, GROUP_NORM_SILU, STATISTICS
from lib_rocm_sd.ops.group_norm.problem import (
    ApplyInputs,
    FinalizeInputs,
    GroupNormInputs,
    ImageInputs,
)
from lib_rocm_sd.ops.keys import described
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM
from lib_rocm_sd.ops.layer_norm.problem import LayerNormInputs
from lib_rocm_sd.ops.linear.kernel import MOST_WEIGHTS
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.problem import LinearInputs

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _by_itself(function: _Function) -> _Function:
    """Without autocast, which would choose other dtypes for some of the operations."""

    @wraps(function)
    def plain(calls: Calls, place: str, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not autocasts():
            return function(calls, place, x, *args, **kwargs)
        with torch.autocast(x.device.type, enabled=False):
            return function(calls, place, x, *args, **kwargs)

    return plain  # type: ignore[return-value]


def attention(
    calls: Calls, place: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Of q (N, Sq, heads, D), k and v (N, Sk, heads, D): (N, Sq, heads * D)."""
    made: torch.Tensor = calls.run(place, ATTENTION, AttentionInputs(q, k, v, None, None))
    return made


def group_norm(
    calls: Calls, place: str, x: torch.Tensor, norm: nn.GroupNorm, silu: bool
) -> torch.Tensor:
    """`norm` of x (N, H, W, C), then SiLU if wanted; like x."""
    own, planes = norm._parameters, x.permute(0, 3, 1, 2)
    inputs = GroupNormInputs(planes, own["weight"], own["bias"], norm.num_groups, norm.eps, silu)
    made: torch.Tensor = calls.run(place, GROUP_NORM_SILU, inputs)
    return made.permute(0, 2, 3, 1)


def norm_of(calls: Calls, place: str, x: torch.Tensor, norm: nn.GroupNorm) -> torch.Tensor:
    """The norm (N, C, 2) of x (N, H, W, C), for `conv`."""
    own = norm._parameters
    statistics = calls.run(f"{place}.statistics", STATISTICS, ImageInputs(x.permute(0, 3, 1, 2)))
    inputs = FinalizeInputs(statistics, own["weight"], own["bias"], norm.num_groups, norm.eps)
    made: torch.Tensor = calls.run(place, FINALIZE, inputs)
    return made


def layer_norm(
    calls: Calls,
    place: str,
    x: torch.Tensor,
    norm: nn.LayerNorm,
    added: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm` of x (.., C), plus `added` if given, and that sum."""
    own = norm._parameters
    inputs = LayerNormInputs(x, own["weight"], own["bias"], norm.eps, added)
    if added is None:
        return calls.run(place, LAYER_NORM, inputs), x
    both: tuple[torch.Tensor, torch.Tensor] = calls.run(f"{place}.added", LAYER_NORM, inputs)
    return both


def linear(
    calls: Calls,
    place: str,
    x: torch.Tensor,
    *layers: Any,
    residual: torch.Tensor | None = None,
    gate: bool = False,
) -> torch.Tensor:
    """What up to three layers make of x (rows, k), side by side: (rows, columns) plus `residual`.

    A layer is a Linear, or a 1x1 convolution of pixels. `gate`: GEGLU.
    """
    made: torch.Tensor = calls.run(place, LINEAR, _inputs(x, layers, residual, gate))
    return made


def linear_added(
    calls: Calls, place: str, x: torch.Tensor, layer: Any, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`linear` of x plus `residual`, None; or without it, and what is still to be added.

    Our kernel adds it at no cost. torch's would take a pass of its own, which the LayerNorm that
    follows saves.
    """
    inputs = _inputs(x, (layer,), residual, False)
    if calls.route(place, LINEAR, inputs).is_ours:
        return calls.run(place, LINEAR, inputs), None
    return linear(calls, f"{place}.alone", x, layer), residual


def _inputs(
    x: torch.Tensor, layers: tuple[Any, ...], residual: torch.Tensor | None, gate: bool
) -> LinearInputs:
    flat = []
    for layer in layers:
        own = layer._parameters  # as layer.weight, in a quarter of the time
        weight = own["weight"]
        flat += [weight if weight.ndim == 2 else weight.flatten(1), own["bias"]]
    flat += _NO_LAYERS[len(layers)]
    return LinearInputs(x, flat[0], flat[1], residual, None, *flat[2:], gate)  # type: ignore[call-arg]


_NO_LAYERS = [(None, None) * (MOST_WEIGHTS - count) for count in range(MOST_WEIGHTS + 1)]


@_by_itself
def conv(
    calls: Calls,
    place: str,
    x: torch.Tensor,
    weights: ConvWeights,
    norm: torch.Tensor | None = None,
    shortcut: torch.Tensor | None = None,
    shortcut_weight: torch.Tensor | None = None,
    embedding: torch.Tensor | None = None,
) -> torch.Tensor:
    """The 3x3 convolution of x (N, H, W, Ci): y (N, H, W, Co).

    `norm` (N, Ci, 2): x is normalised by it and SiLU'd first. `shortcut` (N, H, W, Cs) is added,
    multiplied by `shortcut_weight` (Co, Cs) where there is one; its bias is in `weights`.
    `embedding` (N, Co), whose rows may lie in longer ones, is added to each pixel of its image.
    """
    if norm is not None:
        applied = calls.run(f"{place}.norm", APPLY, ApplyInputs(x.permute(0, 3, 1, 2), norm, True))
        x = applied.permute(0, 2, 3, 1)
    if shortcut is not None and shortcut_weight is not None:
        shortcut = F.linear(_widened(shortcut), shortcut_weight.to(_widened(shortcut)))
    return _convolved(x, weights, shortcut, embedding, 1)


@_by_itself
def upsample(calls: Calls, place: str, x: torch.Tensor, weights: ConvWeights) -> torch.Tensor:
    """The 3x3 convolution of x (N, H, W, C) enlarged by nearest: (N, 2H, 2W, Co)."""
    planes = F.interpolate(x.permute(0, 3, 1, 2), scale_factor=2.0, mode="nearest")
    return _convolved(planes.permute(0, 2, 3, 1), weights, None, None, 1)


@_by_itself
def downsample(calls: Calls, place: str, x: torch.Tensor, weights: ConvWeights) -> torch.Tensor:
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
