"""The backward of attention without a way to run it: inputs, their checks, cases.

A problem is the forward's.
"""

from __future__ import annotations

from lib_rocm_sd.ops.attention import problem as forward
from lib_rocm_sd.ops.attention.problem import AttentionProblem


def tolerance(problem: AttentionProblem) -> float:
    """Largest max |gradient - reference| / max |reference|: weights and their gradients are rounded
    to halves, as in the forward pass, and the output was.
    """
    return {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5}.get(problem.dtype, 1e-12)


def test_problems(problem: AttentionProblem) -> tuple[AttentionProblem, ...]:
    """As the forward's: a small problem of the class, and one with the real tails."""
    return forward.test_problems(problem)


USUAL = (
    ("SD1.5 512x512, self, 64x64 latent", AttentionProblem(2, 8, 4096, 4096, 40)),
    ("SD1.5 512x512, self, 32x32", AttentionProblem(2, 8, 1024, 1024, 80)),
    ("SD1.5 512x512, self, 16x16", AttentionProblem(2, 8, 256, 256, 160)),
    ("SD1.5 512x512, text", AttentionProblem(2, 8, 4096, 77, 40)),
    ("SDXL 1024x1024, self, 64x64", AttentionProblem(2, 10, 4096, 4096, 64)),
    ("SDXL 1024x1024, self, 32x32", AttentionProblem(2, 20, 1024, 1024, 64)),
    ("SDXL 1024x1024, text", AttentionProblem(2, 10, 4096, 77, 64)),
)
"""What a training script asks for, by name."""

ODD = (
    AttentionProblem(1, 2, 33, 77, 40),
    AttentionProblem(2, 1, 17, 65, 64, "bfloat16", "float32"),
    AttentionProblem(1, 1, 35, 19, 128, "bfloat16"),
    AttentionProblem(1, 1, 21, 33, 160, "float16", "bool"),
    AttentionProblem(1, 1, 18, 17, 248, "float16"),
)
"""Small shapes at which indexing errors show. Few: each is run in several ways."""
