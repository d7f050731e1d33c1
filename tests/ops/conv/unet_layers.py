"""The convolutions of Stable Diffusion's UNets that our kernel takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.catalog import unet
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.conv import kernel, rows
from lib_rocm_sd.ops.conv.problem import ConvProblem


def launched() -> Iterator[ConvProblem]:
    """At their pictures' sizes, for one picture and two."""
    for problem in [p for p in unet.problems() if isinstance(p, ConvProblem)]:
        if rows.chunk_of(problem):
            yield from (replace(problem, batch=batch) for batch in (2, 4))


def searched(arch: Arch) -> dict[KernelSpec, int]:
    """Every config of the search space for these, with its work-items."""
    return {
        kernel.spec(problem, config): config.block
        for problem in launched()
        for config in rows.configs(arch, problem)
    }
