"""Random calls of every op but attention's own: sizes, fusions, layouts and values, by a seed.

What a layout leaves unused is NaN. The same seed gives the same call on every device, but for where
memory begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch

from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention_backward.op import ATTENTION_BACKWARD
from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.conv.kernel import KINDS
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import ACTIVATIONS, ConvProblem
from lib_rocm_sd.ops.group_norm.op import APPLY, GROUP_NORM_SILU, NORM, STATISTICS
from lib_rocm_sd.ops.group_norm.problem import (
    ApplyProblem,
    GroupNormProblem,
    ImageProblem,
    NormProblem,
)
from lib_rocm_sd.ops.group_norm_backward.op import GROUP_NORM_BACKWARD
from lib_rocm_sd.ops.group_norm_backward.problem import GroupNormBackwardProblem
from lib_rocm_sd.ops.layer_norm.biased import BiasedProblem
from lib_rocm_sd.ops.layer_norm.heads import MOST_HEAD_DIM, ROTARIES, HeadsProblem
from lib_rocm_sd.ops.layer_norm.modulated import ModulatedProblem
from lib_rocm_sd.ops.layer_norm.op import (
    LAYER_NORM,
    LAYER_NORM_BIASED,
    LAYER_NORM_MODULATED,
    RMS_NORM,
    RMS_NORM_HEADS,
)
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from lib_rocm_sd.ops.layer_norm.rms import RmsProblem
from lib_rocm_sd.ops.layer_norm_backward.op import LAYER_NORM_BACKWARD
from lib_rocm_sd.ops.layer_norm_backward.problem import LayerNormBackwardProblem
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.problem import LinearProblem

HALVES = ("float16", "bfloat16")
AFFINE = ("none", "float16", "bfloat16", "float32")
LAYOUTS = ("plain", "plain", "misaligned", "spread")
VALUES = ("normal", "normal", "normal", "large", "small", "zeros", "nan", "inf", "-inf")
Chosen = tuple[Op[Any, Any], Any]


@dataclass(frozen=True)
class Sizes:
    """The most of each: rows of a matrix or pixels of an image, a side of one, channels."""

    rows: int
    side: int
    channels: int


SMALL = Sizes(90, 17, 136)
LARGE = Sizes(1300, 48, 1344)


def draw(family: str, sizes: Sizes, seed: int, turn: int = 0) -> tuple[Op[Any, Any], Any, Random]:
    """An op, a problem, and what draws the rest. `turn`: another one by the same seed."""
    rng = Random(f"{family} {seed} {turn}")
    return (*FAMILIES[family](rng, sizes), rng)


def inputs_of(op: Op[Any, Any], problem: Any, rng: Random, device: torch.device) -> tuple[Any, str]:
    """Tensors laid out and filled at random, and what is special about them."""
    inputs = op.make_inputs(problem, device, rng.randrange(1 << 30))
    story, changed = [], {}
    named = {name: t for name, t in inputs._asdict().items() if isinstance(t, torch.Tensor)}
    value = rng.choice(VALUES) if op is not ATTENTION_BACKWARD else "normal"
    first = "grad" if "grad" in named else "x"
    written = (named.get("out"), named.get("shortcut" if op.family == "conv" else "residual"))
    in_place = written[0] is not None
    for name, tensor in named.items():
        layout = rng.choice(LAYOUTS)
        if name == first and value != "normal":
            tensor = filled(tensor, value, rng)
            story.append(value)
        if in_place and any(tensor is each for each in written) or _is_fixed(op, name):
            layout = "plain"
        if layout != "plain":
            story.append(f"{name} {layout}")
            tensor = LAY_OUT[layout](tensor, rng)
        changed[name] = tensor
    return inputs._replace(**changed), ", ".join(story)


def _is_fixed(op: Op[Any, Any], name: str) -> bool:
    """Of attention's gradients layouts have tests of their own; a norm is always dense."""
    return op is ATTENTION_BACKWARD or name in ("norm", "out")


def filled(x: torch.Tensor, value: str, rng: Random) -> torch.Tensor:
    """Other values: all larger or smaller, some rows zero, or one that is no number."""
    if value in ("large", "small"):
        return x * (64.0 if value == "large" else 2.0**-10)
    made = x.clone()
    rows = made[rng.randrange(made.shape[0])]
    if value == "zeros":
        rows.zero_()
    else:
        place = tuple(rng.randrange(size) for size in rows.shape)
        rows[place] = float(value)
    return made


def misaligned(x: torch.Tensor, rng: Random) -> torch.Tensor:
    """The same strides from an address that is no multiple of 16 bytes on."""
    offset = rng.choice((1, 2, 3, 5, 7))
    span = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    room = torch.full((span + offset + 1,), math.nan, dtype=x.dtype, device=x.device)
    return room[offset:].as_strided(x.shape, x.stride(), offset).copy_(x)


def spread(x: torch.Tensor, rng: Random) -> torch.Tensor:
    """Rows, or pixels, of which each begins some values later than it would."""
    last = x.ndim - 1 if x.stride(-1) == 1 else x.stride().index(1) if 1 in x.stride() else 0
    moved = x.movedim(last, -1)
    more, first = rng.choice(((8, 0), (24, 8), (16, 16), (3, 1), (1, 0)))
    wide = moved.new_full((*moved.shape[:-1], moved.shape[-1] + more), math.nan)
    made = wide[..., first : first + moved.shape[-1]].copy_(moved)
    return made.movedim(-1, last)


LAY_OUT: dict[str, Callable[[torch.Tensor, Random], torch.Tensor]] = {
    "misaligned": misaligned,
    "spread": spread,
}


def _some(rng: Random, most: int) -> int:
    """Mostly few, sometimes one, at times near a multiple of a tile."""
    if rng.random() < 0.3:
        return max(1, min(most, 16 * rng.randint(1, max(1, most // 16)) + rng.randint(-1, 1)))
    return rng.randint(1, most)


def _eights(rng: Random, most: int) -> int:
    return 8 * _some(rng, most // 8)


def _is(rng: Random, share: float = 0.5) -> bool:
    return rng.random() < share


def linear(rng: Random, sizes: Sizes) -> Chosen:
    """One to three weights, or more, or one with a gate."""
    gate = _is(rng, 0.4)
    count = 1 if gate else rng.choice((1, 2, 3, 3, 5, 9))
    residual = _is(rng)
    problem = LinearProblem(
        _some(rng, sizes.rows),
        _eights(rng, 2 * sizes.channels),
        tuple(_eights(rng, sizes.channels) for _ in range(count)),
        rng.choice(HALVES),
        _is(rng, 0.7),
        residual,
        gate,
        residual and _is(rng),
    )
    return LINEAR, problem


def conv(rng: Random, sizes: Sizes) -> Chosen:
    """Every kind, with weights packed or as they lie."""
    kind = rng.choice(KINDS)
    in_rows, plain = _is(rng), kind == "3x3"
    taken = 16 * _some(rng, sizes.channels // 32)
    made = rng.choice((_eights(rng, sizes.channels // 2), rng.randint(1, 20)))
    shortcut = rng.choice(("none", "identity", "conv")) if plain else "none"
    made = (made + 15) // 16 * 16 if shortcut != "none" else made
    along = {"none": 0, "identity": made, "conv": 16 * _some(rng, sizes.channels // 32)}
    problem = ConvProblem(
        kind,
        rng.randint(1, 3),
        _some(rng, sizes.side) + 2 * (not plain),
        _some(rng, sizes.side) + 2 * (not plain),
        taken,
        made,
        rng.choice(HALVES),
        norm=plain and _is(rng),
        shortcut=shortcut,
        shortcut_channels=along[shortcut],
        statistics=_is(rng, 0.4),
        in_place=shortcut == "identity" and _is(rng),
        embedding=plain and _is(rng),
        in_rows=in_rows,
    )
    return CONVS[kind], problem


def conv_epilogue(rng: Random, sizes: Sizes) -> Chosen:
    """The same with packed weights, an activation, and what is added then."""
    op, problem = conv(rng, sizes)
    without = {"shortcut": "none", "shortcut_channels": 0} if problem.shortcut == "conv" else {}
    activation = rng.choice(ACTIVATIONS if problem.shortcut == "identity" else ACTIVATIONS[:-1])
    return op, replace(problem, **without, in_rows=False, epilogue=activation)


def layer_norm(rng: Random, sizes: Sizes) -> Chosen:
    """Rows of any length."""
    channels = rng.choice((_eights(rng, sizes.channels), _some(rng, sizes.channels)))
    shape = (*((rng.randint(1, 3),) if _is(rng) else ()), _some(rng, sizes.rows), channels)
    dtype, affine = rng.choice(HALVES), rng.choice(AFFINE)
    if _is(rng):
        return LAYER_NORM, LayerNormProblem(shape, dtype, _is(rng), affine)
    return LAYER_NORM_BIASED, BiasedProblem(shape, dtype, False, affine, _is(rng))


def modulated_norm(rng: Random, sizes: Sizes) -> Chosen:
    """Images have few tokens or many."""
    channels = rng.choice((_eights(rng, sizes.channels), _some(rng, sizes.channels)))
    shape = (rng.randint(1, 3), _some(rng, sizes.rows // 2), channels)
    dtype = rng.choice(HALVES)
    return LAYER_NORM_MODULATED, ModulatedProblem(shape, dtype, _is(rng), dtype)


def rms_norm(rng: Random, sizes: Sizes) -> Chosen:
    """Rows that are held."""
    shape = (_some(rng, sizes.rows), _eights(rng, sizes.channels))
    dtype, affine = rng.choice(HALVES), rng.choice(AFFINE[1:])
    return RMS_NORM, RmsProblem(shape, dtype, False, affine, _is(rng))


def norm_of_heads(rng: Random, sizes: Sizes) -> Chosen:
    """One stream or two, with any of their weights, turned or not."""
    words, rotary = rng.choice((0, _some(rng, sizes.side))), rng.choice(ROTARIES)
    normed = tuple(_is(rng, 0.7) and (words > 0 or place < 2) for place in range(4))
    counts = (rng.randint(1, 3), _some(rng, sizes.side), words, rng.randint(1, 5))
    head_dim, dtype = _eights(rng, MOST_HEAD_DIM), rng.choice(HALVES)
    of_images = rotary != ROTARIES[0] and _is(rng)
    return RMS_NORM_HEADS, HeadsProblem(*counts, head_dim, dtype, normed, rotary, of_images)


def layer_norm_backward(rng: Random, sizes: Sizes) -> Chosen:
    """The same, with some gradients or all."""
    _, p = layer_norm(rng, sizes)
    made = LayerNormBackwardProblem(p.shape, p.dtype, p.added, p.affine, _is(rng, 0.7))
    return LAYER_NORM_BACKWARD, made


def _image(rng: Random, sizes: Sizes) -> tuple[Any, int]:
    """What an ImageProblem is made of, and groups."""
    groups = rng.choice((1, 2, 8, 32))
    channels = groups * _some(rng, max(1, sizes.channels // 2 // groups))
    sides = (_some(rng, sizes.side), _some(rng, sizes.side))
    return (rng.randint(1, 3), channels, *sides, rng.choice(HALVES), _is(rng, 0.7)), groups


def group_norm(rng: Random, sizes: Sizes) -> Chosen:
    """All of it, or one of its steps."""
    image, groups = _image(rng, sizes)
    silu: Any = (_is(rng),)
    normed: Any = (groups, rng.choice(AFFINE))
    return rng.choice(
        (
            (GROUP_NORM_SILU, GroupNormProblem(*image, *silu, *normed)),
            (NORM, NormProblem(*image, *normed)),
            (STATISTICS, ImageProblem(*image)),
            (APPLY, ApplyProblem(*image, *silu)),
        )
    )


def group_norm_backward(rng: Random, sizes: Sizes) -> Chosen:
    """Some gradients, or all."""
    image, groups = _image(rng, replace(sizes, side=max(4, sizes.side // 2)))
    fused: Any = (_is(rng), groups, rng.choice(AFFINE), _is(rng, 0.7))
    return GROUP_NORM_BACKWARD, GroupNormBackwardProblem(*image, *fused)


def attention_backward(rng: Random, sizes: Sizes) -> Chosen:
    """Every head_dim, with a mask or without. Of few keys the gradients of q and k are rounding; of
    few heads the largest errors are luck (tests/ops/attention_backward/judge.py).
    """
    problem = AttentionProblem(
        rng.randint(2, 3),
        rng.randint(2, 4),
        _some(rng, sizes.rows // 2),
        8 + _some(rng, sizes.rows),
        rng.choice((40, 64, 80, 160, 8 * rng.randint(1, 20))),
        rng.choice(HALVES),
        rng.choice(("none", "none", "bool", "float16", "float32")),
    )
    return ATTENTION_BACKWARD, problem


FAMILIES: dict[str, Callable[[Random, Sizes], Chosen]] = {
    each.__name__: each
    for each in (
        linear,
        conv,
        conv_epilogue,
        layer_norm,
        modulated_norm,
        rms_norm,
        norm_of_heads,
        layer_norm_backward,
        group_norm,
        group_norm_backward,
        attention_backward,
    )
}
