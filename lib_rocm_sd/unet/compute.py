"""All that the blocks of a UNet compute. `place` names the call among those of its block.

Convolutions read their weights as they lie (ConvWeights.in_rows). On the CPU they are torch's,
computed in float32 and rounded once, as our kernels do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lib_rocm_sd.calls import Calls
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.conv.inputs import ConvInputs, NextNorm
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import Band
from lib_rocm_sd.ops.conv.torch import LibraryConv, enlarged
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.ops.group_norm.inputs import (
    ApplyInputs,
    FinalizeInputs,
    GroupNormInputs,
    ImageInputs,
    NormInputs,
)
from lib_rocm_sd.ops.group_norm.op import APPLY, FINALIZE, GROUP_NORM_SILU, NORM, STATISTICS
from lib_rocm_sd.ops.group_norm.whole import WholeConfig
from lib_rocm_sd.ops.layer_norm.biased import BiasedInputs
from lib_rocm_sd.ops.layer_norm.inputs import LayerNormInputs
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM, LAYER_NORM_BIASED
from lib_rocm_sd.ops.linear.inputs import LinearInputs, placed
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.unet.divided import merged, surrounded


def attention(
    calls: Calls,
    place: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q (N, Sq, heads, D), k and v (N, Sk, heads, D): (N, Sq, heads * D). `mask`
    (N, Sq or 1, Sk) is added to the scores of all heads, or says which of them count; or int32
    (N, 1, 1) how many of the first keys.
    """
    mask = None if mask is None else mask[:, None]
    return calls.run(place, ATTENTION, AttentionInputs(q, k, v, mask, None))


def added(
    x: torch.Tensor, more: torch.Tensor, scale: float, weights: torch.Tensor | None
) -> torch.Tensor:
    """x (N, rows, C), to which `scale` times `more` is added in place, by `weights` (N, rows, 1) of
    its rows.
    """
    if weights is None:
        return x.add_(more, alpha=scale)
    return x.addcmul_(more, weights, value=scale)


def group_norm(
    calls: Calls, place: str, x: torch.Tensor, norm: nn.GroupNorm, silu: bool
) -> torch.Tensor:
    """`norm` of x (N, H, W, C), then SiLU if wanted; like x."""
    made: torch.Tensor
    if calls.divided is None:
        made = calls.run(place, GROUP_NORM_SILU, _normed(x, norm, silu))
    else:
        scale = norm_of(calls, f"{place}.norm", x, norm)
        made = calls.run(place, APPLY, ApplyInputs(x.permute(0, 3, 1, 2), scale, silu))
    return made.permute(0, 2, 3, 1)


def activated(
    calls: Calls,
    place: str,
    x: torch.Tensor,
    norm: nn.GroupNorm,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """SiLU of `norm` of x (N, H, W, C), to each pixel of which `added` (N, C), float32, is added
    first; like x.
    """
    if added is None:
        return group_norm(calls, place, x, norm, True)
    inputs = _normed(x, norm, True)._replace(added=added)
    if calls.divided or not calls.route(f"{place}.added", GROUP_NORM_SILU, inputs).is_ours:
        x = (x + added[:, None, None]).to(x.dtype)
        return group_norm(calls, place, x, norm, True)
    made: torch.Tensor = calls.run(f"{place}.added", GROUP_NORM_SILU, inputs)
    return made.permute(0, 2, 3, 1)


def _normed(x: torch.Tensor, norm: nn.GroupNorm, silu: bool) -> GroupNormInputs:
    own, planes = norm._parameters, x.permute(0, 3, 1, 2)
    return GroupNormInputs(planes, own["weight"], own["bias"], norm.num_groups, norm.eps, silu)


def norm_of(calls: Calls, place: str, x: torch.Tensor, norm: nn.GroupNorm) -> torch.Tensor:
    """The norm (N, C, 2) of x (N, H, W, C), for `conv`."""
    own, planes = norm._parameters, x.permute(0, 3, 1, 2)
    affine = own["weight"], own["bias"], norm.num_groups, norm.eps
    if calls.divided is None:
        return calls.run(place, NORM, NormInputs(planes, *affine))
    statistics = calls.run(f"{place}.statistics", STATISTICS, ImageInputs(planes))
    return _Finish(calls, place)(statistics, *affine)


def modulated(norm: torch.Tensor | None, modulation: torch.Tensor) -> torch.Tensor:
    """`norm` (N, C, 2) whose result is then multiplied by 1 + a and added to b, the halves of
    `modulation` (N, 2 C): of its scales and shifts, before they are applied.
    """
    assert norm is not None
    a, b = modulation.chunk(2, 1)
    made = torch.addcmul(norm, norm, a[..., None])
    made.select(-1, 1).add_(b)
    return made


def resized(x: torch.Tensor, resize: str) -> torch.Tensor:
    """x (N, H, W, C) "up": twice the size, by nearest; or "down": means of four pixels."""
    planes = x.permute(0, 3, 1, 2)
    made = enlarged(planes) if resize == "up" else nn.functional.avg_pool2d(planes, 2)
    return made.permute(0, 2, 3, 1).contiguous()


Rest = tuple[torch.Tensor, ...]
"""What is still to be added to a stream of rows (rows, C): nothing, one tensor like it, or biases
(C) of products that have been added to it, two at most.
"""


def layer_norm(
    calls: Calls,
    place: str,
    x: torch.Tensor,
    norm: nn.LayerNorm,
    rest: Rest = (),
    ahead: nn.Module | None = None,
    keeps: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, Rest]:
    """`norm` of x (rows, C) with its `rest`; x, and what is its rest from then on.

    `keeps`, or `ahead` of a layer whose product is added next: x is a new tensor, which has all of
    the rest, and that layer's bias.
    """
    own = norm._parameters
    plain = x, own["weight"], own["bias"], norm.eps
    if rest and rest[0].ndim > 1:
        made, x = calls.run(f"{place}.added", LAYER_NORM, LayerNormInputs(*plain, rest[0]))
        return made, x, ()
    bias = None if ahead is None else ahead._parameters.get("bias")
    keeps = bias is not None or (keeps and bool(rest))
    if not rest and not keeps:
        return calls.run(place, LAYER_NORM, LayerNormInputs(*plain)), x, ()
    first, second = (*rest, None, None)[:2]
    inputs = BiasedInputs(*plain, first, second, bias, keeps)
    if not keeps:
        return calls.run(f"{place}.biased", LAYER_NORM_BIASED, inputs), x, rest
    made, x = calls.run(f"{place}.kept", LAYER_NORM_BIASED, inputs)
    return made, x, ()


def linear(
    calls: Calls,
    place: str,
    x: torch.Tensor,
    *layers: Any,
    residual: torch.Tensor | None = None,
    gate: bool = False,
) -> torch.Tensor:
    """What up to MOST_WEIGHTS layers make of x (rows, k), side by side: (rows, columns), plus
    `residual`.

    A layer is a Linear, or a 1x1 convolution of pixels. `gate`: GEGLU.
    """
    return calls.run(place, LINEAR, _inputs(x, layers, residual, gate))


def linear_added(
    calls: Calls, place: str, x: torch.Tensor, layer: Any, residual: torch.Tensor, mine: bool
) -> tuple[torch.Tensor, Rest]:
    """`linear` of x added to `residual`, and what is its rest. `mine`: residual may be written to.

    Then the product is added in place, which a library can only without a bias: the norm that
    follows adds it. Else our kernel makes a new tensor of it all, and a library's product is the
    rest, which would take a pass of its own.
    """
    if mine:
        bias = layer._parameters.get("bias")
        rest = () if bias is None else (bias,)
        return linear_onto(calls, place, x, layer, residual), rest
    whole = _inputs(x, (layer,), residual, False)
    if calls.route(place, LINEAR, whole).is_ours:
        return calls.run(place, LINEAR, whole), ()
    return residual, (linear(calls, f"{place}.alone", x, layer),)


def linear_onto(
    calls: Calls, place: str, x: torch.Tensor, layer: Any, residual: torch.Tensor
) -> torch.Tensor:
    """`residual`, to which the layer's product of x is added without its bias."""
    whole = _inputs(x, (layer,), residual, False)
    return calls.run(f"{place}.onto", LINEAR, whole._replace(bias=None, out=residual))


def _inputs(
    x: torch.Tensor, layers: tuple[Any, ...], residual: torch.Tensor | None, gate: bool
) -> LinearInputs:
    flat = []
    for layer in layers:
        own = layer._parameters  # as layer.weight, in a quarter of the time
        weight = own["weight"]
        flat += [weight if weight.ndim == 2 else weight.flatten(1), own.get("bias")]
    weight, bias, others, more = placed(flat)
    return LinearInputs(x, weight, bias, residual, None, *others, gate, more)


def conv(
    calls: Calls,
    place: str,
    x: torch.Tensor,
    weights: ConvWeights,
    norm: torch.Tensor | None = None,
    shortcut: torch.Tensor | None = None,
    shortcut_weight: torch.Tensor | None = None,
    next_norm: nn.GroupNorm | None = None,
    embedding: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The 3x3 convolution of x (N, H, W, Ci): y (N, H, W, Co), and its norm for `next_norm`.

    `norm` (N, Ci, 2): x is normalised by it and SiLU'd first. `shortcut` (N, H, W, Cs) is added,
    multiplied by `shortcut_weight` (Co, Cs) where there is one; its bias is in `weights`.
    `embedding` (N, Co), whose rows may lie in longer ones, is added to each pixel of its image.
    """
    following = None if next_norm is None else _following(next_norm)
    finish = _Finish(calls, place) if following else None
    x, band = _surrounded(calls, x, x.shape[1])
    inputs = ConvInputs(
        *(x, weights, norm, shortcut, following, None, band, None),
        *(finish, embedding, shortcut_weight),
    )
    y, made = calls.run(place, CONVS["3x3"], inputs)
    if band is not None and following is not None and finish is not None:  # of a band: statistics
        affine = following.gamma, following.beta, following.groups, following.eps
        made = finish(made.flatten(1, 2), *affine)
    return _whole(y, weights), made


def conv_over_frames(
    calls: Calls, place: str, x: torch.Tensor, conv: nn.Conv3d, bias: torch.Tensor | None
) -> torch.Tensor:
    """The convolution of each pixel's frames, by 3 taps, of x (N, frames, pixels, Ci): (.., Co).

    Each tap is a product of all frames that have a neighbour there, which are rows side by side;
    the second and third are added in place. The weight lies tap by tap: our kernel takes it dense.
    """
    before, own, after = conv._parameters["weight"].flatten(2).unbind(2)  # type: ignore[union-attr]
    first = LinearInputs(x.flatten(0, 2), own, bias)
    y: torch.Tensor = calls.run(place, LINEAR, first).view(*x.shape[:3], -1)
    for given, made in zip(x, y, strict=True) if x.shape[1] > 1 else ():
        for tap, read, onto in ((before, given[:-1], made[1:]), (after, given[1:], made[:-1])):
            rows = onto.flatten(0, 1)
            calls.run(
                f"{place}.onto", LINEAR, LinearInputs(read.flatten(0, 1), tap, None, rows, rows)
            )
    return y


def _surrounded(
    calls: Calls, x: torch.Tensor, rows: int, below: int = 1
) -> tuple[torch.Tensor, Band | None]:
    """x (N, H, W, C) with the rows of other ranks that its convolution to `rows` rows reads."""
    if calls.divided is None:
        return x, None
    x, above = surrounded(calls.divided, x, below)
    return x, Band(above, rows)


def is_librarys(
    calls: Calls,
    place: str,
    x: torch.Tensor,
    weights: ConvWeights,
    norm: nn.GroupNorm,
    next_norm: nn.GroupNorm,
    embedding: torch.Tensor | None,
) -> bool:
    """Whether `conv` of x (N, H, W, Ci), with these, is a library's, and its image so small that a
    norm, and SiLU, are one launch of ours: then they are better made by themselves.
    """
    if calls.divided or (embedding is not None and embedding.dtype != torch.float32):
        return False
    route = calls.known(place)
    if route is None:
        posed = x.new_empty((x.shape[0], x.shape[3], 2), dtype=torch.float32)
        whole = ConvInputs(x, weights, posed, next_norm=_following(next_norm), embedding=embedding)
        route = calls.route(place, CONVS["3x3"], whole)
    if route.plan is None or not isinstance(route.plan.variant, LibraryConv):
        return False
    route = calls.route(f"{place}.before", GROUP_NORM_SILU, _normed(x, norm, True))
    return route.is_ours and isinstance(route.config, WholeConfig)


def upsample(calls: Calls, place: str, x: torch.Tensor, weights: ConvWeights) -> torch.Tensor:
    """The 3x3 convolution of x (N, H, W, C) enlarged by nearest: (N, 2H, 2W, Co)."""
    x, band = _surrounded(calls, x, 2 * x.shape[1])
    made = calls.run(place, CONVS["upsample"], ConvInputs(x, weights, band=band))
    return _whole(made[0], weights)


def downsample(calls: Calls, place: str, x: torch.Tensor, weights: ConvWeights) -> torch.Tensor:
    """The 3x3 convolution of x (N, H, W, C) in steps of two pixels, padded on all sides by one."""
    x, band = _surrounded(calls, x, -(-x.shape[1] // 2), 0)
    made = calls.run(place, CONVS["3x3 stride 2 padded"], ConvInputs(x, weights, band=band))
    return _whole(made[0], weights)


def _following(norm: nn.GroupNorm) -> NextNorm:
    own = norm._parameters
    return NextNorm(own["weight"], own["bias"], norm.num_groups, norm.eps)  # type: ignore[arg-type]


class _Finish:
    """Makes the norm of an image's statistics, or of all ranks', from a place of its own."""

    __slots__ = ("_calls", "_place")

    def __init__(self, calls: Calls, place: str) -> None:
        self._calls, self._place = calls, f"{place}.norm"

    def __call__(self, statistics: torch.Tensor, *affine: Any) -> torch.Tensor:
        divided = self._calls.divided
        if divided is not None:
            statistics = divided.statistics(merged(statistics))
        return self._calls.run(self._place, FINALIZE, FinalizeInputs(statistics, *affine))


def _whole(y: torch.Tensor, weights: ConvWeights) -> torch.Tensor:
    """y without the channels that it was padded by."""
    made = weights.weight.shape[0]
    return y if y.shape[3] == made else y[..., :made].contiguous()
