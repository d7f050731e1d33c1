"""LayerNorm without a way to run it: problems, their checks, inputs, cases."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, TypeVar

import torch

from lib_rocm_sd.ops.base import reasons
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES, DTYPES
from lib_rocm_sd.ops.keys import described, tensor_errors
from lib_rocm_sd.ops.layer_norm.formula import is_float


@dataclass(frozen=True)
class LayerNormProblem:
    """x (..., C), without its tensors. `added`: whether another is added first. `affine`: "none" or
    the dtype of gamma and beta; the wider one where they differ.
    """

    shape: tuple[int, ...]
    dtype: str = "float16"
    added: bool = False
    affine: str = "float16"

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        return f"{sizes} {self.dtype}{' added' if self.added else ''}, {self.affine} gamma"

    @property
    def first(self) -> str:
        """What is added first, one of kernel.ADDED_KINDS."""
        return "tensor" if self.added else "nothing"

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
        return prod(self.shape) * DTYPES[self.dtype].itemsize


AnyProblem = TypeVar("AnyProblem", bound=LayerNormProblem)


class LayerNormInputs(NamedTuple):
    """x (..., C), gamma and beta (C), added like x."""

    x: torch.Tensor
    gamma: torch.Tensor | None
    beta: torch.Tensor | None
    eps: float
    added: torch.Tensor | None = None


def key_of(inputs: LayerNormInputs) -> Hashable:
    """All strides are in it: a bound launch counts on them. Written out, because a picture asks it
    thousands of times.
    """
    x, gamma, beta, _, added = inputs
    graded = torch.is_grad_enabled()
    wanted = graded and [t is not None and t.requires_grad for t in (x, gamma, beta, added)]
    return (
        *(x.shape, x.stride(), x.dtype, x.device),
        gamma is None or (gamma.shape, gamma.stride(), gamma.dtype, gamma.device),
        beta is None or (beta.shape, beta.stride(), beta.dtype, beta.device),
        added is None or (added.shape, added.stride(), added.dtype, added.device),
        wanted and tuple(wanted),
    )


def problem_of(inputs: LayerNormInputs) -> LayerNormProblem:
    """ValueError, with all shapes, on a caller's mistake."""
    x, gamma, beta, _, added = inputs
    named = {"gamma": gamma, "beta": beta, "added": added}
    given = {name: t for name, t in named.items() if t is not None}
    wrong = tensor_errors(x=x, **given) or _errors(x, given)
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}: {described(x=x, **given)}")
    kinds = [t.dtype for t in (gamma, beta) if t is not None]
    affine = "none"
    if kinds:
        affine = DTYPE_NAMES[torch.promote_types(kinds[0], kinds[-1])]
    return LayerNormProblem(tuple(x.shape), DTYPE_NAMES[x.dtype], added is not None, affine)


def _errors(x: torch.Tensor, given: dict[str, torch.Tensor]) -> list[str]:
    if x.ndim == 0:
        return ["x must be (..., C)"]
    channels = x.shape[-1]
    found = reasons((not is_float(x), f"dtype {x.dtype} is not a float type known here"))
    for name, tensor in given.items():
        affine = name != "added"
        found += reasons(
            (affine and tensor.shape != (channels,), f"{name} must have {channels} values"),
            (affine and not is_float(tensor), f"{name} of {tensor.dtype}"),
            (not affine and tensor.shape != x.shape, f"{name} must have the shape of x"),
            (not affine and tensor.dtype != x.dtype, f"{name} must have the dtype of x"),
            (tensor.device != x.device, f"{name} must be on {x.device}"),
        )
    return found


def make_inputs(problem: LayerNormProblem, device: torch.device, seed: int) -> LayerNormInputs:
    """Random, each row around a mean of its own."""
    generator = torch.Generator("cpu").manual_seed(seed)
    dtype, shape = DTYPES[problem.dtype], problem.shape

    def drawn() -> torch.Tensor:
        means = 2 * torch.randn((*shape[:-1], 1), generator=generator)
        return (torch.randn(shape, generator=generator) + means).to(dtype).to(device)

    x, added = drawn(), drawn() if problem.added else None
    gamma = beta = None
    if problem.affine != "none":
        gamma = 1 + 0.3 * torch.randn(problem.channels, generator=generator)
        beta = 0.5 * torch.randn(problem.channels, generator=generator)
        gamma, beta = (t.to(DTYPES[problem.affine]).to(device) for t in (gamma, beta))
    return LayerNormInputs(x, gamma, beta, 1e-5, added)


def tolerance(problem: LayerNormProblem) -> float:
    """Largest max |out - reference| / max |reference|: a few units in the last place."""
    return {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-5}.get(problem.dtype, 1e-12)


def test_problems(problem: AnyProblem) -> tuple[AnyProblem, ...]:
    """Rows of the same length: one, and more than work-groups make evenly."""
    return tuple(replace(problem, shape=(rows, problem.channels)) for rows in (37, 1))


test_problems.__test__ = False  # type: ignore[attr-defined]  # not a test for pytest

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
