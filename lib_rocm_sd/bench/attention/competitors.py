"""What else a user could pick, each as a variant beside the op's own: for benchmarks only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.bench.methods import METHODS
from lib_rocm_sd.ops import optional
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionInputs, AttentionProblem
from lib_rocm_sd.ops.base import Launch, Variant, reasons

TRITON_RUN = "lib_rocm_sd.bench.attention.triton_run"
UNMASKED = "written for the comparison, without masks"


class TritonAttention(Variant[AttentionProblem, AttentionInputs]):
    """The kernel of Triton's tutorial as its users write it; of its configs the fastest counts."""

    name = "triton tutorial-like"

    def refusals(self, arch: Arch | None, problem: AttentionProblem) -> list[str]:
        why = optional.absent("triton", TRITON_RUN)
        if why:
            return [why]
        return reasons(
            (problem.mask != "none", UNMASKED),
            (problem.dtype not in ("float16", "bfloat16"), f"{problem.dtype}: it takes halves"),
        )

    def configs(self, arch: Arch | None, problem: AttentionProblem) -> Sequence[Any]:
        return _triton().configs(problem.head_dim)  # type: ignore[no-any-return]

    def run(
        self,
        launch: Launch | None,
        config: Any,
        problem: AttentionProblem,
        inputs: AttentionInputs,
    ) -> torch.Tensor:
        q, k, v, _, scale = inputs
        return _triton().run(config, q, k, v, scale)  # type: ignore[no-any-return]


def _triton() -> Any:
    """Imported where it is called: it needs Triton."""
    return optional.module(TRITON_RUN)


COMPETITORS: tuple[Variant[AttentionProblem, AttentionInputs], ...] = (
    *(variant for variant in ATTENTION.every if not variant.ours),
    *METHODS,
    TritonAttention(),
)
"""All that is not ours."""
