"""Linear layers without a way to run them: problems, their checks, inputs, cases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle, islice

from lib_rocm_sd.ops.linear.kernel import MOST_WEIGHTS
from lib_rocm_sd.ops.linear.layers import LAYERS
from lib_rocm_sd.unet_step import Linear, told


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


def problem_of_layer(layer: Linear) -> LinearProblem:
    """In half precision; what is added is written over."""
    made = (layer.rows, layer.k, layer.columns, "float16")
    return LinearProblem(*made, layer.bias, layer.residual, layer.gate, layer.residual)


USUAL = tuple((layer.name, problem_of_layer(layer)) for layer in LAYERS)
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
