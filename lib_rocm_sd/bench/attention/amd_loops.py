"""AMD's loops of attention.hip on an NVIDIA card: for benchmarks and tests only.

Up to head_dim 256, and with `ahead` at 512, rocm_sd runs loops there whose tiles are copied to LDS
without passing registers, which no AMD card can do. These are the others, with the tiles of
gfx1100, whose waves have 32 lanes too. The matrix unit stays NVIDIA's, and with it how V lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from lib_rocm_sd.arch import Arch, table
from lib_rocm_sd.ops.attention.kernel import AttentionConfig
from lib_rocm_sd.ops.attention.ours import MatrixAttention
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import KernelSpec

CONFIGS_OF = "gfx1100"


@cache
def with_amd_loops(spec: KernelSpec) -> KernelSpec:
    """The same, with the loops that AMD runs."""
    return replace(spec, defines=(*spec.defines, ("AMD_LOOPS", 1)))


class AmdLoops(MatrixAttention):
    """kernels/attention.hip with AMD_LOOPS."""

    name = "rocm_sd, AMD's loops"
    preference = 0

    def refusals(self, arch: Arch | None, problem: AttentionProblem) -> list[str]:
        if arch is not None and arch.is_amd:
            return ["on an AMD card rocm_sd's own are these"]
        return super().refusals(arch, problem)

    def configs(self, arch: Arch | None, problem: AttentionProblem) -> Sequence[AttentionConfig]:
        return super().configs(table()[CONFIGS_OF] if arch else None, problem)

    def defaults(self, arch: Arch | None, problem: AttentionProblem) -> Sequence[AttentionConfig]:
        return self.configs(arch, problem)[:1]

    def spec(self, problem: AttentionProblem, config: AttentionConfig) -> KernelSpec:
        return with_amd_loops(super().spec(problem, config))
