"""Convolutions without a way to run them: problems, their checks, the formula, inputs, cases."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache


@dataclass(frozen=True)
class Band:
    """Only `rows` rows of the output are made, from an x that is cut out of a larger image.

    `above`: rows of x before the one at which the first of them lies, which it needs where the
    image goes on above: 1, but 0 at the image's top and for "3x3 stride 2". x ends with the last
    row that is needed. For "upsample", `rows` is even.
    """

    above: int
    rows: int


ACTIVATIONS = ("none", "leaky relu", "prelu", "silu", "gate")
"""In the order of Epilogue in common/conv.h."""


@dataclass(frozen=True)
class Epilogue:
    """y = scale * activation(y) before a shortcut is added, and y = second_scale * y + second after
    that where there is a second one. `slope`: of "leaky relu"; "prelu" has ConvWeights.slopes.
    "gate" multiplies y + shortcut by sigmoid(y) - 1/2, SPAN's attention without parameters.
    """

    activation: str = "none"
    slope: float = 0.0
    scale: float = 1.0
    second_scale: float = 1.0


MANY_CHANNELS = 512
"""Layers with so many are at an image's lower resolutions."""

DEEP = 640
"""Layers with so many channels are a UNet's: no VAE has them."""

STATISTICS_ROWS = 16
"""Bands that begin and end at multiples of it have, together, the statistics of the whole image."""


@dataclass(frozen=True)
class ConvProblem:
    """One call, without its tensors. `shortcut` is one of conv_kernel.SHORTCUTS.

    `in_place`: the output is written where the shortcut lies. `embedding`: one is added. `in_rows`:
    the weights are read as they lie, in channels-last memory; x has exactly their channels.
    `epilogue`: the activation of an Epilogue, None without one.
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
    epilogue: str | None = None

    def __str__(self) -> str:
        fused = [name for name in ("norm", "statistics", "embedding") if getattr(self, name)]
        fused += [f"{self.shortcut} shortcut"] if self.shortcut != "none" else []
        fused += ["in place"] if self.in_place else []
        fused += ["weights as they lie"] if self.in_rows else []
        fused += [f"epilogue {self.epilogue}"] if self.epilogue is not None else []
        shape = f"N{self.batch} {self.height}x{self.width} {self.in_channels}->{self.out_channels}"
        return " ".join([self.kind, shape, self.dtype, *fused])

    @property
    def out_size(self) -> tuple[int, int]:
        """Rows and columns of the output."""
        return out_size(self.kind, self.height, self.width)

    @property
    def through(self) -> int:
        """Channels that the shortcut's 1x1 weight multiplies; 0 where it has none."""
        return self.shortcut_channels if self.shortcut == "conv" else 0

    @property
    def in_values(self) -> int:
        """Number of values in the input."""
        return self.batch * self.height * self.width * self.in_channels

    @property
    def out_values(self) -> int:
        """Number of values in the output."""
        rows, columns = self.out_size
        return self.batch * rows * columns * self.out_channels

    @property
    def flops(self) -> int:
        """Multiplications and additions of the direct form."""
        rows, columns = self.out_size
        per_pixel = 9 * self.in_channels + self.through
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


def tolerance(problem: ConvProblem) -> float:
    """Largest max |out - reference| / max |reference|: a few units in the last place.

    Of float32, what TF32 gives (eleven bits, as fp16), which torch's convolutions may use.
    """
    return {"float16": 3e-3, "bfloat16": 2.5e-2, "float32": 3e-3}.get(problem.dtype, 1e-12)


@lru_cache(maxsize=1024)
def test_problems(problem: ConvProblem) -> tuple[ConvProblem, ...]:
    """The same channels and fusions on images with ragged edges, small ones of many channels. There
    are three: one that is neither the first nor the last.
    """
    height, width = (3, 17) if problem.in_channels >= DEEP else (9, 9)
    return (replace(problem, batch=3, height=height, width=width),)


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
