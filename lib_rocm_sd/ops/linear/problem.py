"""Linear layers as problems: what vouches for them, and cases. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, groupby, islice
from typing import Any

MOST_WEIGHTS = 144
"""On one input, in one launch, .."""
FEW_WEIGHTS = 3
""".. and of which the kernel has no table."""
_MOST_TOLD = 3


def told(columns: Iterable[int]) -> str:
    """Columns side by side; more than three alike in a row are counted."""
    parts = []
    for count, alike in groupby(columns):
        times = len([*alike])
        parts += [f"{times} x {count}"] if times > _MOST_TOLD else [str(count)] * times
    return "+".join(parts)


@dataclass(frozen=True)
class LinearProblem:
    """(rows, k) by weights that make `columns` each. `bias`: of any weight. `gate`: GEGLU, by one
    weight of twice as many rows. `in_place`: the output is written where the residual lies.
    """

    rows: int
    k: int
    columns: tuple[int, ...]
    dtype: str = "float16"
    bias: bool = True
    residual: bool = False
    gate: bool = False
    in_place: bool = False

    def __str__(self) -> str:
        made = told(self.columns)
        fused = [name for name in ("bias", "residual", "gate") if getattr(self, name)]
        fused += ["in place"] if self.in_place else []
        return " ".join((f"{self.rows} x {self.k} to {made} {self.dtype}", *fused))

    @property
    def all_columns(self) -> int:
        """Columns of the output."""
        return sum(self.columns)

    @property
    def weight_rows(self) -> int:
        """Rows of all weights together."""
        return self.all_columns * (1 + self.gate)

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.rows * self.k * self.weight_rows


def tolerance(problem: LinearProblem) -> float:
    """Largest max |out - reference| / max |reference|: torch rounds more than once."""
    return {"float16": 3e-3, "bfloat16": 2.4e-2, "float32": 2e-5}.get(problem.dtype, 1e-12)


def output_shape(problem: LinearProblem) -> tuple[int, ...]:
    """(rows, all columns)."""
    return problem.rows, problem.all_columns


_TRIED_WEIGHTS = 5
"""Stand for many."""


def test_problems(problem: LinearProblem) -> tuple[LinearProblem, ...]:
    """Small ones of the class (dtype, how many weights, what is fused): with tails of whole tiles
    in all three sizes, and a single row.
    """
    count = min(len(problem.columns), _TRIED_WEIGHTS)

    def some(*columns: int) -> tuple[int, ...]:
        return tuple(islice(cycle(columns), count))

    return (
        replace(problem, rows=147, k=328, columns=some(136, 264, 72)),
        replace(problem, rows=1, k=640, columns=some(8, 24, 40)),
    )


def measured_as(problem: LinearProblem) -> LinearProblem:
    """The next power of two of rows: not every new size of a picture is measured."""
    return replace(problem, rows=max(16, 1 << (max(problem.rows, 1) - 1).bit_length()))


def _embedded(deep: int) -> tuple[int, ...]:
    """Channels of a UNet's residual blocks, of which so many have 1280."""
    return (320, 320, 640, 640, *(1280,) * deep, 640, 640, 640, 320, 320, 320)


def _of_tokens(model: str, size: str, rows: int, width: int) -> Iterator[tuple[str, LinearProblem]]:
    """A transformer block's and its projections'; what is added to is written over."""
    added: dict[str, Any] = {"residual": True, "in_place": True}
    for name, problem in (
        ("GEGLU", LinearProblem(rows, width, (4 * width,), gate=True)),
        ("feed-forward out", LinearProblem(rows, 4 * width, (width,), **added)),
        ("q k v", LinearProblem(rows, width, (width,) * 3, bias=False)),
        ("projection in", LinearProblem(rows, width, (width,))),
        ("attention out", LinearProblem(rows, width, (width,), **added)),
        ("q of the text", LinearProblem(rows, width, (width,), bias=False)),
    ):
        yield f"{model}, {size}, {name}", problem


def _usual() -> Iterator[tuple[str, LinearProblem]]:
    """The layers of catalog/unet.py's STEPS, by model, the largest first; a test compares."""
    small = [
        *_of_tokens("SD1.5 512x512", "64x64", 8192, 320),
        *_of_tokens("SD1.5 512x512", "32x32", 2048, 640),
        *_of_tokens("SD1.5 512x512", "16x16", 512, 1280),
        *_of_tokens("SD1.5 512x512", "8x8", 128, 1280),
    ]
    large = [
        *_of_tokens("SDXL 1024x1024", "64x64", 8192, 640),
        *_of_tokens("SDXL 1024x1024", "32x32", 2048, 1280),
    ]
    small_text = (*(320,) * 4, *(640,) * 4, *(1280,) * 12, *(640,) * 6, *(320,) * 6)
    large_text = (*(640,) * 8, *(1280,) * 120, *(640,) * 12)
    once = ((small, "SD1.5", 768, small_text, 12, 320), (large, "SDXL", 2048, large_text, 7, 2816))
    for layers, model, context, text, deep, first in once:
        prompt = LinearProblem(154, context, text, bias=False)
        layers.append((f"{model}, k v of the text", prompt))
        sizes = [(1280, _embedded(deep)), (1280, (1280,)), (first, (1280,))]
        for k, columns in sizes if model == "SD1.5" else (sizes[0], sizes[2]):
            name = f"{model}, time embedding {k} to {told(columns)}"
            layers.append((name, LinearProblem(2, k, columns)))
        yield from sorted(layers, key=lambda layer: -layer[1].flops)


USUAL = tuple(_usual())
"""What a Stable Diffusion user meets, by name; on the first hangs whether our kernel is usable."""

ODD = (
    LinearProblem(1, 8, (8,)),
    LinearProblem(2, 2056, (24,), "bfloat16", residual=True),
    LinearProblem(77, 40, (320,), bias=False, gate=True),
    LinearProblem(131, 320, (24, 8, 320), "bfloat16"),
    LinearProblem(154, 72, (8, 1288), bias=False, residual=True, in_place=True),
    LinearProblem(1, 2048, (88,), "bfloat16", residual=True, gate=True, in_place=True),
    LinearProblem(147, 1288, (40,), residual=True),
    LinearProblem(77, 72, (8, 136, 8, 264, 8), "bfloat16"),
    LinearProblem(2, 40, (24, *(8,) * (MOST_WEIGHTS - 1)), residual=True),
)
"""Small shapes at which indexing errors show."""
