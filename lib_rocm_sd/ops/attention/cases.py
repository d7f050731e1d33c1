"""The problems that tests, benchmark and tuner share; no other list of them is kept."""

from __future__ import annotations

from dataclasses import dataclass

from lib_rocm_sd.ops.attention.problem import AttentionProblem


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
