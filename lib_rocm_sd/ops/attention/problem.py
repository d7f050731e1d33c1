"""Attention without a way to run it: problems, their checks, the formula, inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lib_rocm_sd.ops.base import ITEM_BYTES

LONGEST_MEASURED = 1 << 14
"""Longer sequences are measured as this one: each call takes long, and the ranking stays."""

VAE_MEASURED = 1 << 12


@dataclass(frozen=True)
class AttentionProblem:
    """One call, without its tensors. `mask` is "none" or the mask's dtype, of key lengths int32."""

    batch: int
    heads: int
    seq_q: int
    seq_k: int
    head_dim: int
    dtype: str = "float16"
    mask: str = "none"

    def __str__(self) -> str:
        sizes = f"B{self.batch} H{self.heads} Sq{self.seq_q} Sk{self.seq_k} D{self.head_dim}"
        return f"{sizes} {self.dtype}" + ("" if self.mask == "none" else f" {self.mask} mask")

    @property
    def score_bytes(self) -> int:
        """Size of a whole score matrix in this dtype."""
        return self.batch * self.heads * self.seq_q * self.seq_k * ITEM_BYTES[self.dtype]

    @property
    def flops(self) -> int:
        """Floating-point operations of the two products."""
        return 4 * self.batch * self.heads * self.seq_q * self.seq_k * self.head_dim


def tolerance(problem: AttentionProblem) -> float:
    """Largest max |out - reference| / max |reference|: a few units in the last place."""
    return {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-5}.get(problem.dtype, 1e-12)


def output_shape(problem: AttentionProblem) -> tuple[int, ...]:
    """(batch, seq_q, heads * head_dim)."""
    return (problem.batch, problem.seq_q, problem.heads * problem.head_dim)


def measured_as(problem: AttentionProblem) -> AttentionProblem:
    """Long sequences at the nearest power of two up to LONGEST_MEASURED, the VAE's at one size.

    So pictures of about the same size are measured once.
    """
    if problem.head_dim > 256:
        return replace(problem, seq_q=VAE_MEASURED, seq_k=VAE_MEASURED)

    def nearest(seq: int) -> int:
        return seq if seq < 256 else min(1 << round(math.log2(seq)), LONGEST_MEASURED)

    return replace(problem, seq_q=nearest(problem.seq_q), seq_k=nearest(problem.seq_k))


def test_problems(problem: AttentionProblem) -> tuple[AttentionProblem, ...]:
    """A small problem of the class (dtype, head_dim, mask kind), and one with the real tails."""
    small = replace(problem, batch=2, heads=2, seq_q=77, seq_k=131)
    tails = replace(
        small,
        seq_q=min(problem.seq_q, 128 + problem.seq_q % 128),
        seq_k=min(problem.seq_k, 128 + problem.seq_k % 128),
    )
    return (small, tails)


@dataclass(frozen=True)
class Case:
    """What a Stable Diffusion user meets, by name, in float16.

    `usual`: also what self-tests, the doctor and the tuner look at; the others are many or large,
    and for the benchmark.
    """

    name: str
    problem: AttentionProblem
    usual: bool = False


CASES = (
    Case("SD1.5 512x512, self, 64x64 latent", AttentionProblem(2, 8, 4096, 4096, 40), True),
    Case("SD1.5 512x512, self, 32x32", AttentionProblem(2, 8, 1024, 1024, 80), True),
    Case("SD1.5 512x512, self, 16x16", AttentionProblem(2, 8, 256, 256, 160), True),
    Case("SD1.5 512x512, text", AttentionProblem(2, 8, 4096, 77, 40), True),
    Case("SD1.5 512x512, text, 32x32", AttentionProblem(2, 8, 1024, 77, 80)),
    Case("SD1.5 512x512, text, 16x16", AttentionProblem(2, 8, 256, 77, 160)),
    Case("SD1.5 1024x1024, self, 128x128", AttentionProblem(2, 8, 16384, 16384, 40)),
    Case("SD1.5 1024x1024, self, 64x64", AttentionProblem(2, 8, 4096, 4096, 80)),
    Case("SD1.5 1024x1024, self, 32x32", AttentionProblem(2, 8, 1024, 1024, 160)),
    Case("SD1.5 1024x1024, text", AttentionProblem(2, 8, 16384, 77, 40)),
    Case("SD1.5 1024x1024, text, 64x64", AttentionProblem(2, 8, 4096, 77, 80)),
    Case("SD1.5 1024x1024, text, 32x32", AttentionProblem(2, 8, 1024, 77, 160)),
    Case("SDXL 1024x1024, self, 64x64", AttentionProblem(2, 10, 4096, 4096, 64), True),
    Case("SDXL 1024x1024, self, 32x32", AttentionProblem(2, 20, 1024, 1024, 64), True),
    Case("SDXL 1024x1024, text", AttentionProblem(2, 10, 4096, 77, 64), True),
    Case("SDXL 1024x1024, text, 32x32", AttentionProblem(2, 20, 1024, 77, 64)),
    Case("VAE mid-block, 512x512", AttentionProblem(1, 1, 4096, 4096, 512), True),
    Case("VAE mid-block, 1024x1024", AttentionProblem(1, 1, 16384, 16384, 512)),
    Case("SD3 or Flux, 1024x1024", AttentionProblem(1, 24, 4250, 4250, 128)),
)
"""In the order of tables. A batch of 2 is a prompt and its negative."""

USUAL = tuple((case.name, case.problem) for case in CASES if case.usual)
"""On the first hangs whether our kernel counts as usable."""

ODD = (
    AttentionProblem(1, 1, 1, 1, 8),
    AttentionProblem(2, 3, 17, 15, 40),
    AttentionProblem(1, 2, 113, 203, 72, "bfloat16"),
    AttentionProblem(1, 1, 65, 77, 80, "float16", "bool"),
    AttentionProblem(1, 2, 31, 154, 128, "bfloat16", "float32"),
    AttentionProblem(1, 1, 33, 65, 160, "float16", "float16"),
    AttentionProblem(1, 1, 34, 33, 248, "bfloat16"),
    AttentionProblem(1, 1, 35, 231, 256),
    AttentionProblem(1, 1, 37, 67, 512, "bfloat16", "bfloat16"),
)
"""Small shapes at which indexing errors show."""
