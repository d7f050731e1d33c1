"""LayerNorm without a way to run it: problems, their checks, inputs, cases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, TypeVar

from lib_rocm_sd.ops.base import ITEM_BYTES


@dataclass(frozen=True)
class LayerNormProblem:
    """x (..., C), without its tensors. `added`: whether another is added first. `affine`: "none" or
    the dtype of gamma and beta; the wider one where they differ.
    """

    shape: tuple[int, ...]
    dtype: str = "float16"
    added: bool = False
    affine: str = "float16"
    modulated: ClassVar[bool] = False
    """Whether gamma and beta are of each image."""

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        return f"{sizes} {self.dtype}{' added' if self.added else ''}, {self.affine} gamma"

    @property
    def first(self) -> str:
        """What is added first, one of kernel.ADDED_KINDS."""
        return "tensor" if self.added else "nothing"

    @property
    def rms(self) -> int:
        """Which of kernel.RMS_KINDS it is."""
        return 0

    @property
    def channels(self) -> int:
        """Values of a row."""
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """How many."""
        return prod(self.shape[:-1])

    @property
    def tensor_bytes(self) -> int:
        """Size of x."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


AnyProblem = TypeVar("AnyProblem", bound=LayerNormProblem)


def test_problems(problem: AnyProblem) -> tuple[AnyProblem, ...]:
    """Rows of the same length: one, and more than work-groups make evenly."""
    return tuple(replace(problem, shape=(rows, problem.channels)) for rows in (37, 1))


LEAST_MEASURED, MOST_MEASURED = 64, 16384
"""Rows."""


def measured_as(problem: AnyProblem) -> AnyProblem:
    """As many rows as the next power of two has: no new size of a picture is measured."""
    rows = min(MOST_MEASURED, 1 << max(0, problem.rows - 1).bit_length())
    return replace(problem, shape=(max(LEAST_MEASURED, rows), problem.channels))


USUAL = (
    ("SD1.5 512x512, 64x64", LayerNormProblem((2, 4096, 320))),
    ("SD1.5 512x512, 64x64, added", LayerNormProblem((2, 4096, 320), added=True)),
    ("SD1.5 512x512, 32x32", LayerNormProblem((2, 1024, 640))),
    ("SD1.5 512x512, 32x32, added", LayerNormProblem((2, 1024, 640), added=True)),
    ("SD1.5 512x512, 16x16", LayerNormProblem((2, 256, 1280))),
    ("SD1.5 512x512, 16x16, added", LayerNormProblem((2, 256, 1280), added=True)),
    ("SD1.5 512x512, 8x8", LayerNormProblem((2, 64, 1280))),
    ("SDXL 1024x1024, 64x64", LayerNormProblem((2, 4096, 640))),
    ("SDXL 1024x1024, 64x64, added", LayerNormProblem((2, 4096, 640), added=True)),
    ("SDXL 1024x1024, 32x32", LayerNormProblem((2, 1024, 1280))),
    ("SDXL 1024x1024, 32x32, added", LayerNormProblem((2, 1024, 1280), added=True)),
    ("SDXL refiner, 64x64", LayerNormProblem((2, 4096, 768))),
    ("SD1.5 text encoder", LayerNormProblem((2, 77, 768))),
    ("DiT 1024x1024", LayerNormProblem((1, 4096, 3072), "bfloat16", affine="none")),
)
"""What a Stable Diffusion user meets, by name."""

ODD = (
    LayerNormProblem((1, 8)),
    LayerNormProblem((3, 5, 7), "float16", True, "float32"),
    LayerNormProblem((17, 320), "bfloat16", True, "bfloat16"),
    LayerNormProblem((2, 3, 3, 40), "float16", False, "none"),
    LayerNormProblem((1,), "bfloat16", True, "none"),
    LayerNormProblem((9, 648), "float16", True, "bfloat16"),
    LayerNormProblem((5, 1280), "bfloat16", False, "float32"),
    LayerNormProblem((2, 2056), "float16", True, "float16"),
    LayerNormProblem((3, 6184), "float16", True, "float16"),
    LayerNormProblem((2, 12301), "bfloat16", True, "bfloat16"),
)
"""Small shapes at which indexing errors show."""
