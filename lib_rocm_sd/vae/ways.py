"""How a convolution will be run, and the memory that this takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lib_rocm_sd.ops.base import Variant
from lib_rocm_sd.ops.conv.inputs import ConvInputs
from lib_rocm_sd.ops.conv.kernel import statistics_bytes
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import ConvProblem


@dataclass(frozen=True)
class ConvWay:
    """A variant and its config, for all convolutions of a class."""

    variant: Variant[ConvProblem, ConvInputs]
    config: Any

    @property
    def fused(self) -> bool:
        """True for our kernel, which makes nothing but the output and its statistics."""
        return isinstance(self.variant, MatrixConv)

    def workspace_bytes(self, problem: ConvProblem) -> int:
        """Bytes beside input and output."""
        if not self.fused:
            return self.variant.workspace(problem)
        if not problem.statistics:
            return 0
        size, rows = problem.out_size, self.config.rows
        return problem.batch * statistics_bytes(problem.kind, *size, problem.out_channels, rows)


Chosen = Callable[[ConvProblem], ConvWay]
"""Says how a convolution will be run; asked about those of the whole frame."""
