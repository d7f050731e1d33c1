"""The tensors of a convolution: their checks, the problem that they pose, random ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from lib_rocm_sd.ops.base import reasons
from lib_rocm_sd.ops.conv.kernel import KINDS
from lib_rocm_sd.ops.conv.layout import is_in_place
from lib_rocm_sd.ops.conv.problem import (
    ACTIVATIONS,
    Band,
    ConvProblem,
    Epilogue,
    made_shape,
    out_size,
    output_shape,
)
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES, DTYPES, FLOATS
from lib_rocm_sd.ops.gradients import gradient_refusals
from lib_rocm_sd.ops.keys import described, tensor_errors
from lib_rocm_sd.ops.lazily import torch


@dataclass(frozen=True, eq=False)
class NextNorm:
    """The GroupNorm that reads a convolution's output: gamma and beta (C), groups, eps."""

    gamma: torch.Tensor
    beta: torch.Tensor
    groups: int
    eps: float


MOST_DRAWN = 1 << 21
"""Random values that one image is made of."""

Finish: TypeAlias = "Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, float], torch.Tensor]"
"""The norm (N, C, 2) from statistics (N, parts, C, 4), gamma and beta (C), groups and eps."""


class ConvInputs(NamedTuple):
    """One call; functional.conv says what each is."""

    x: torch.Tensor
    weights: ConvWeights
    norm: torch.Tensor | None = None
    shortcut: torch.Tensor | None = None
    next_norm: NextNorm | None = None
    overflow: torch.Tensor | None = None
    band: Band | None = None
    out: torch.Tensor | None = None
    finish: Finish | None = None
    """Makes the next norm; None: the variant does. One for the whole image and for its bands."""
    embedding: torch.Tensor | None = None
    shortcut_weight: torch.Tensor | None = None
    """In place of the one that `weights` would have."""
    epilogue: Epilogue | None = None
    second: torch.Tensor | None = None

    @property
    def through(self) -> torch.Tensor | None:
        """The shortcut's weight (Co, Cs)."""
        return (
            self.weights.shortcut_weight if self.shortcut_weight is None else self.shortcut_weight
        )


Result: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"
"""y, and the next norm or, of a band, statistics."""


def input_refusals(inputs: ConvInputs) -> list[str]:
    """Why kernels of ours cannot take these tensors."""
    following = inputs.next_norm
    wide = following is not None and torch.float64 in (following.gamma.dtype, following.beta.dtype)
    return gradient_refusals(*_followed(inputs)) + reasons(
        (wide, "gamma or beta of the next norm in float64")
    )


def empty(problem: ConvProblem, inputs: ConvInputs) -> Result:
    """Results without values; of a band without elements statistics of one part."""
    x, next_norm, band = inputs.x, inputs.next_norm, inputs.band
    y = x.new_empty(made_shape(problem, band))
    if next_norm is None:
        return y, None
    batch, channels = problem.batch, problem.out_channels
    shape = (batch, channels, 2) if band is None else (batch, 1, 1, channels, 4)
    return y, x.new_empty(shape, dtype=torch.promote_types(x.dtype, torch.float32))


def _followed(inputs: ConvInputs) -> tuple[torch.Tensor | None, ...]:
    """What may have a gradient."""
    i, following = inputs, inputs.next_norm
    affine = () if following is None else (following.gamma, following.beta)
    tensors = (i.x, i.norm, i.shortcut, i.embedding, i.shortcut_weight, i.second)
    return (*tensors, *i.weights.followed, *affine)


def key_of(inputs: ConvInputs) -> Hashable:
    """All that the problem of a kind, its checks and the refusals depend on, without the checks
    themselves. Written out, because a picture asks it thousands of times.
    """
    x, weights, norm, shortcut, following, _, band, out, _, embedding, own, *_ = inputs
    epilogue, second = inputs.epilogue, inputs.second
    weight, through = weights.weight, weights.shortcut_weight
    return (
        *(x.shape, x.stride()[-1:], x.dtype, x.device),
        *(weight.shape, weight.stride()[-1:], weight.dtype, weight.device, weights.in_rows),
        None if through is None else through.shape,
        norm is None or (norm.shape, norm.stride()[-1:], norm.dtype, norm.device),
        shortcut is None
        or (shortcut.shape, shortcut.stride()[-1:], shortcut.dtype, shortcut.device),
        out is None
        or (out.shape, out.stride()[-1:], out.dtype, out.device, is_in_place(shortcut, out)),
        embedding is None
        or (embedding.shape, embedding.stride()[-1:], embedding.dtype, embedding.device),
        own is None or (own.shape, own.stride()[-1:], own.dtype, own.device),
        epilogue and (epilogue.activation, weights.slopes is None),
        second is None or (second.shape, second.stride()[-1:], second.dtype, second.device),
        following is None or (following.groups, following.gamma.dtype, following.beta.dtype),
        band,
        torch.is_grad_enabled()
        and tuple(t is not None and t.requires_grad for t in _followed(inputs)),
    )


def problem_of(kind: str, inputs: ConvInputs) -> ConvProblem:
    """ValueError, with shapes, on a caller's mistake."""
    x, weights, norm, shortcut, next_norm, _, band, out, _, embedding, through, *_ = inputs
    epilogue, second = inputs.epilogue, inputs.second
    optional = {"norm": norm, "shortcut": shortcut, "out": out, "embedding": embedding}
    optional["second"] = second
    if weights.in_rows:
        optional |= {"weight": weights.weight, "shortcut_weight": through}
    tensors = {name: t for name, t in optional.items() if t is not None}
    wrong = tensor_errors(x=x, **tensors) or reasons(
        (x.ndim != 4 or x.dtype not in FLOATS, "x must be a float (N, H, W, C)"),
        *((t.device != x.device, f"{name} must be on {x.device}") for name, t in tensors.items()),
        (
            embedding is not None and embedding.dtype not in (x.dtype, torch.float32),
            f"embedding must be {x.dtype} or float32",
        ),
        *(
            (
                name.endswith(("weight", "second")) and t.dtype != x.dtype,
                f"{name} must be {x.dtype}",
            )
            for name, t in tensors.items()
        ),
        (through is not None and not weights.in_rows, "packed weights have their shortcut's"),
        (
            epilogue is not None and epilogue.activation == "prelu" and weights.slopes is None,
            "prelu without slopes",
        ),
    )
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}: {_described(inputs)}")
    facts = (
        kind,
        x.shape,
        DTYPE_NAMES[x.dtype],
        weights.weight.shape,
        None if inputs.through is None else inputs.through.shape,
        None if norm is None else norm.shape,
        None if shortcut is None else shortcut.shape,
        None if next_norm is None else next_norm.groups,
        None if band is None else band.rows,
        is_in_place(shortcut, out),
        None if embedding is None else embedding.shape,
        weights.in_rows,
        None if epilogue is None else epilogue.activation,
        None if second is None else second.shape,
    )
    try:
        answer = _problem(*facts)
    except TypeError:  # symbols for sizes cannot be looked up
        answer = _problem.__wrapped__(*facts)
    if isinstance(answer, ConvProblem):
        return answer
    raise ValueError(f"{'; '.join(answer)}: {_described(inputs)}")


def _described(inputs: ConvInputs) -> str:
    i = inputs
    fused = dict(norm=i.norm, shortcut=i.shortcut, embedding=i.embedding, out=i.out)
    weights = dict(weight=i.weights.weight, shortcut_weight=i.through)
    return described(x=i.x, **weights, **fused, second=i.second)


@lru_cache(maxsize=1024)
def _problem(
    kind: str,
    x: torch.Size,
    dtype: str,
    weight: torch.Size,
    shortcut_weight: torch.Size | None,
    norm: torch.Size | None,
    shortcut: torch.Size | None,
    groups: int | None,
    band_rows: int | None,
    in_place: bool,
    embedding: torch.Size | None,
    in_rows: bool,
    epilogue: str | None,
    second: torch.Size | None,
) -> ConvProblem | list[str]:
    """What `problem_of` gives for tensors of these shapes, or what is wrong with them. Sizes may be
    symbols: they are written down where something is wrong and nowhere else, since
    torch.compile would take them as fixed.
    """
    batch, height, width, channels = x
    out_channels, in_channels = weight[:2]
    rows, columns = out_size(kind, height, width)
    rows = rows if band_rows is None else band_rows
    wrong = reasons(
        (kind not in KINDS, f"kind {kind} is none of {', '.join(KINDS)}"),
        (
            channels != in_channels if in_rows else channels % 16 or channels < in_channels,
            f"{channels} channels for a weight of {in_channels}",
        ),
        (rows < 1 or columns < 1, f"x is too small for {kind}"),
        (norm is not None and norm != (batch, channels, 2), "norm must be (N, Ci, 2)"),
        (
            shortcut is not None and shortcut[:3] != (batch, rows, columns),
            "shortcut must be (N, Ho, Wo, C)",
        ),
        (
            groups is not None and (groups < 1 or out_channels % groups != 0),
            f"{out_channels} channels do not divide into the next norm's {groups} groups",
        ),
        (embedding is not None and embedding != (batch, out_channels), "embedding must be (N, Co)"),
        (
            in_rows
            and shortcut_weight not in (None, (out_channels, shortcut[3] if shortcut else 0)),
            "a shortcut's weight must be (Co, Cs)",
        ),
    )
    how = "none" if shortcut is None else "conv" if shortcut_weight else "identity"
    wrong += reasons(
        (
            epilogue not in (None, *ACTIVATIONS),
            f"activation {epilogue} is none of {', '.join(ACTIVATIONS)}",
        ),
        (epilogue is not None and how == "conv", "an epilogue has no 1x1 shortcut"),
        (epilogue == "gate" and shortcut is None, "a gate needs a shortcut"),
        (
            second is not None and (epilogue is None or second != shortcut),
            "second must be as the shortcut of an epilogue",
        ),
    )
    if wrong:
        return wrong
    taken_along = 0 if shortcut is None else shortcut[3]
    fused = (norm is not None, how, taken_along, groups is not None, in_place)
    added = embedding is not None
    sizes = (batch, height, width, channels, out_channels)
    return ConvProblem(kind, *sizes, dtype, *fused, added, in_rows, epilogue)


def make_inputs(problem: ConvProblem, device: torch.device, seed: int) -> ConvInputs:
    """Random inputs, drawn on the CPU; the same on every device. Large images repeat themselves."""
    p = problem
    dtype = DTYPES[p.dtype]
    generator = torch.Generator("cpu").manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def image(height: int, width: int, channels: int) -> torch.Tensor:
        shape = (p.batch, height, width, channels)
        count = math.prod(shape)
        values = draw(min(count, MOST_DRAWN)).to(dtype).to(device)
        return values.repeat(-(-count // MOST_DRAWN))[:count].view(shape)

    taken, out = p.in_channels, p.out_channels
    rows, columns = p.out_size
    share = (9 * taken) ** -0.5
    weight = (draw(out, taken, 3, 3) * share).to(dtype).to(device)
    weights = ConvWeights(
        weight.contiguous(memory_format=torch.channels_last) if p.in_rows else weight,
        draw(out).to(dtype).to(device),
        (draw(out, p.shortcut_channels) * p.shortcut_channels**-0.5).to(dtype).to(device)
        if p.shortcut == "conv"
        else None,
        in_rows=p.in_rows,
        slopes=draw(out).to(dtype).to(device) if p.epilogue == "prelu" else None,
    )
    norm = torch.stack((draw(p.batch, taken).abs() + 0.1, draw(p.batch, taken)), -1).to(device)
    groups = next(g for g in (32, 8, 4, 2, 1) if out % g == 0)
    next_norm = NextNorm(draw(out).to(device), draw(out).to(device), groups, 1e-6)
    padded = output_shape(p)[3]
    has_second = p.epilogue is not None and p.shortcut == "identity"
    wide = image(rows, columns, max(p.shortcut_channels, padded if p.in_place else 0))
    return ConvInputs(
        image(p.height, p.width, taken),
        weights,
        norm if p.norm else None,
        wide[..., : p.shortcut_channels] if p.shortcut != "none" else None,
        next_norm if p.statistics else None,
        out=wide[..., :padded] if p.in_place else None,
        embedding=draw(p.batch, out).to(dtype).to(device) if p.embedding else None,
        epilogue=None if p.epilogue is None else Epilogue(p.epilogue, 0.2, 0.7, 0.4),
        second=image(rows, columns, p.shortcut_channels) if has_second else None,
    )
