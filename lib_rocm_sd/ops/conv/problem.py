"""Convolutions without a way to run them: problems, their checks, the formula, inputs, cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from lib_rocm_sd.ops.base import reasons
from lib_rocm_sd.ops.conv.kernel import KINDS
from lib_rocm_sd.ops.conv.layout import is_in_place
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES, DTYPES, FLOATS
from lib_rocm_sd.ops.gradients import gradient_refusals, is_wanted
from lib_rocm_sd.ops.keys import described, key_by, tensor_errors


@dataclass(frozen=True, eq=False)
class NextNorm:
    """The GroupNorm that reads a convolution's output: gamma and beta (C), groups, eps."""

    gamma: torch.Tensor
    beta: torch.Tensor
    groups: int
    eps: float


@dataclass(frozen=True)
class Band:
    """Only `rows` rows of the output are made, from an x that is cut out of a larger image.

    `above`: rows of x before the one at which the first of them lies, which it needs where the
    image goes on above: 1, but 0 at the image's top and for "3x3 stride 2". x ends with the last
    row that is needed. For "upsample", `rows` is even.
    """

    above: int
    rows: int


MANY_CHANNELS = 512
"""Layers with so many are at an image's lower resolutions."""


DEEP = 640
"""Layers with so many channels are a UNet's: no VAE has them."""


MOST_DRAWN = 1 << 21
"""Random values that one image is made of."""


STATISTICS_ROWS = 16
"""Bands that begin and end at multiples of it have, together, the statistics of the whole image."""


@dataclass(frozen=True)
class ConvProblem:
    """One call, without its tensors. `shortcut` is one of conv_kernel.SHORTCUTS.

    `in_place`: the output is written where the shortcut lies. `embedding`: one is added. `in_rows`:
    the weights are read as they lie, in channels-last memory; x has exactly their channels.
    """

    kind: str
    batch: int
    height: int
    width: int
    in_channels: int
    out_channels: int
    dtype: str = "float16"
    norm: bool = False
    shortcut: str = "none"
    shortcut_channels: int = 0
    statistics: bool = False
    in_place: bool = False
    embedding: bool = False
    in_rows: bool = False

    def __str__(self) -> str:
        fused = [name for name in ("norm", "statistics", "embedding") if getattr(self, name)]
        fused += [f"{self.shortcut} shortcut"] if self.shortcut != "none" else []
        fused += ["in place"] if self.in_place else []
        fused += ["weights as they lie"] if self.in_rows else []
        shape = f"N{self.batch} {self.height}x{self.width} {self.in_channels}->{self.out_channels}"
        return " ".join([self.kind, shape, self.dtype, *fused])

    @property
    def out_size(self) -> tuple[int, int]:
        """Rows and columns of the output."""
        return out_size(self.kind, self.height, self.width)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the direct form."""
        rows, columns = self.out_size
        per_pixel = 9 * self.in_channels + self.shortcut_channels * (self.shortcut == "conv")
        return 2 * self.batch * rows * columns * self.out_channels * per_pixel


def out_size(kind: str, height: int, width: int) -> tuple[int, int]:
    """Rows and columns that a convolution of this kind gives."""
    if kind == "upsample":
        return 2 * height, 2 * width
    if kind == "3x3 stride 2":
        return (height - 2) // 2 + 1, (width - 2) // 2 + 1
    if kind == "3x3 stride 2 padded":
        return (height - 1) // 2 + 1, (width - 1) // 2 + 1
    return height, width


Finish = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, float], torch.Tensor]
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

    @property
    def through(self) -> torch.Tensor | None:
        """The shortcut's weight (Co, Cs)."""
        return (
            self.weights.shortcut_weight if self.shortcut_weight is None else self.shortcut_weight
        )


Result = tuple[torch.Tensor, "torch.Tensor | None"]
"""y, and the next norm or, of a band, statistics."""


def input_refusals(inputs: ConvInputs) -> list[str]:
    """Why kernels of ours cannot take these tensors."""
    following = inputs.next_norm
    wide = following is not None and torch.float64 in (following.gamma.dtype, following.beta.dtype)
    return gradient_refusals(*_followed(inputs)) + reasons(
        (wide, "gamma or beta of the next norm in float64")
    )


def _followed(inputs: ConvInputs) -> tuple[torch.Tensor | None, ...]:
    """What may have a gradient."""
    i, following = inputs, inputs.next_norm
    affine = () if following is None else (following.gamma, following.beta)
    given = (i.x, i.norm, i.shortcut, i.embedding, i.shortcut_weight)
    return (*given, *i.weights.followed, *affine)


def key_of(kind: str, inputs: ConvInputs) -> Hashable:
    """Beside the problem, what changes the output's shape or whether the call is right."""
    i = inputs
    tensors = (i.x, i.weights.weight, i.norm, i.shortcut, i.out, i.embedding, i.shortcut_weight)
    groups = None if i.next_norm is None else i.next_norm.groups
    affine = None if i.next_norm is None else (i.next_norm.gamma.dtype, i.next_norm.beta.dtype)
    wanted = is_wanted(*_followed(i))
    return key_by(lambda _: (problem_of(kind, i), groups, affine, i.band, wanted))(tensors)


def problem_of(kind: str, inputs: ConvInputs) -> ConvProblem:
    """ValueError, with shapes, on a caller's mistake."""
    x, weights, norm, shortcut, next_norm, _, band, out, _, embedding, through = inputs
    optional = {"norm": norm, "shortcut": shortcut, "out": out, "embedding": embedding}
    if weights.in_rows:
        optional |= {"weight": weights.weight, "shortcut_weight": through}
    given = {name: t for name, t in optional.items() if t is not None}
    wrong = tensor_errors(x=x, **given) or reasons(
        (x.ndim != 4 or x.dtype not in FLOATS, "x must be a float (N, H, W, C)"),
        *((t.device != x.device, f"{name} must be on {x.device}") for name, t in given.items()),
        (
            embedding is not None and embedding.dtype not in (x.dtype, torch.float32),
            f"embedding must be {x.dtype} or float32",
        ),
        *(
            (name.endswith("weight") and t.dtype != x.dtype, f"{name} must be {x.dtype}")
            for name, t in given.items()
        ),
        (through is not None and not weights.in_rows, "packed weights have their shortcut's"),
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
    )
    try:
        found = _problem(*facts)
    except TypeError:  # symbols for sizes cannot be looked up
        found = _problem.__wrapped__(*facts)
    if isinstance(found, ConvProblem):
        return found
    raise ValueError(f"{'; '.join(found)}: {_described(inputs)}")


def _described(inputs: ConvInputs) -> str:
    i = inputs
    fused = dict(norm=i.norm, shortcut=i.shortcut, embedding=i.embedding, out=i.out)
    return described(x=i.x, weight=i.weights.weight, **fused, shortcut_weight=i.through)


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
) -> ConvProblem | list[str]:
    """What `problem_of` gives for tensors of these shapes, or what is wrong with them. Sizes may be
    symbols: they are written down where something is wrong and nowhere else, since
    torch.compile would take them as fixed.
    """
    batch, height, width, channels = x
    made, taken = weight[:2]
    rows, columns = out_size(kind, height, width)
    rows = rows if band_rows is None else band_rows
    wrong = reasons(
        (kind not in KINDS, f"kind {kind} is none of {', '.join(KINDS)}"),
        (
            channels != taken if in_rows else channels % 16 or channels < taken,
            f"{channels} channels for a weight of {taken}",
        ),
        (rows < 1 or columns < 1, f"x is too small for {kind}"),
        (norm is not None and norm != (batch, channels, 2), "norm must be (N, Ci, 2)"),
        (
            shortcut is not None and shortcut[:3] != (batch, rows, columns),
            "shortcut must be (N, Ho, Wo, C)",
        ),
        (
            groups is not None and (groups < 1 or made % groups != 0),
            f"{made} channels do not divide into the next norm's {groups} groups",
        ),
        (embedding is not None and embedding != (batch, made), "embedding must be (N, Co)"),
        (
            in_rows and shortcut_weight not in (None, (made, shortcut[3] if shortcut else 0)),
            "a shortcut's weight must be (Co, Cs)",
        ),
    )
    if wrong:
        return wrong
    how = "none" if shortcut is None else "conv" if shortcut_weight else "identity"
    taken_along = 0 if shortcut is None else shortcut[3]
    fused = (norm is not None, how, taken_along, groups is not None, in_place)
    added = embedding is not None
    return ConvProblem(kind, batch, height, width, channels, made, dtype, *fused, added, in_rows)


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
    )
    norm = torch.stack((draw(p.batch, taken).abs() + 0.1, draw(p.batch, taken)), -1).to(device)
    groups = next(g for g in (32, 8, 4, 2, 1) if out % g == 0)
    next_norm = NextNorm(draw(out).to(device), draw(out).to(device), groups, 1e-6)
    padded = output_shape(p)[3]
    wide = image(rows, columns, max(p.shortcut_channels, padded if p.in_place else 0))
    return ConvInputs(
        image(p.height, p.width, taken),
        weights,
        norm if p.norm else None,
        wide[..., : p.shortcut_channels] if p.shortcut != "none" else None,
        next_norm if p.statistics else None,
        out=wide[..., :padded] if p.in_place else None,
        embedding=draw(p.batch, out).to(dtype).to(device) if p.embedding else None,
    )


def tolerance(problem: ConvProblem) -> float:
    """Largest max |out - reference| / max |reference|: a few units in the last place.

    Of float32, what TF32 gives (eleven bits, as fp16), which torch's convolutions may use.
    """
    return {"float16": 3e-3, "bfloat16": 2.5e-2, "float32": 3e-3}.get(problem.dtype, 1e-12)


@lru_cache(maxsize=1024)
def test_problems(problem: ConvProblem) -> tuple[ConvProblem, ...]:
    """The same channels and fusions on an image with ragged edges, a small one of many channels."""
    height, width = (5, 18) if problem.in_channels >= DEEP else (11, 19)
    return (replace(problem, batch=2, height=height, width=width),)


@lru_cache(maxsize=1024)
def measured_as(problem: ConvProblem) -> ConvProblem:
    """The same channels and fusions at one size: no new size of an image is ever measured. A UNet's
    images are small, and how small decides: theirs are measured at the next power of two.
    """
    if problem.in_channels >= DEEP or problem.in_rows:
        side = _power_of_2(math.isqrt(max(problem.height * problem.width, 1) - 1) + 1)
        return replace(problem, batch=_power_of_2(problem.batch), height=side, width=side)
    side = 256 if problem.in_channels >= MANY_CHANNELS else 512
    return replace(problem, batch=1, height=side, width=side)


def _power_of_2(number: int) -> int:
    """The next that is not less."""
    return 1 << max(number - 1, 0).bit_length()


def output_shape(problem: ConvProblem) -> tuple[int, int, int, int]:
    rows, columns = problem.out_size
    return (problem.batch, rows, columns, (problem.out_channels + 7) // 8 * 8)


def usual(kind: str) -> tuple[tuple[str, ConvProblem], ...]:
    """The layers of the VAE at 1024x1024; of the UNet at 512x512 what the VAE does not have."""
    sizes: tuple[tuple[int, int, int], ...]
    if kind == "3x3 stride 2 padded":
        return tuple(
            (f"{c} channels at {s}", ConvProblem(kind, 2, s, s, c, c, statistics=True))
            for c, s in ((320, 64), (640, 32), (1280, 16))
        )
    if kind == "upsample":
        sizes = ((128, 512, 512), (256, 512, 512), (512, 256, 256))
        return tuple(
            (f"{c} channels at {s}", ConvProblem(kind, 1, s, s, c, o)) for s, c, o in sizes
        )
    sizes = ((128, 512, 512), (256, 512, 512), (512, 256, 256), (1024, 128, 128))
    return tuple(
        (f"{c} channels at {s}", ConvProblem(kind, 1, s, s, c, o, norm=True, statistics=True))
        for s, c, o in sizes
    )


def made_shape(problem: ConvProblem, band: Band | None) -> tuple[int, int, int, int]:
    """What is made: (N, rows, columns, C padded)."""
    batch, rows, columns, channels = output_shape(problem)
    return batch, rows if band is None else band.rows, columns, channels
