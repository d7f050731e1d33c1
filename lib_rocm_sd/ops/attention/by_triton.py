"""Attention by our kernel in Triton, where Triton is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops import optional
from lib_rocm_sd.ops.attention.formula import expand_mask, scale_of
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Call, Variant, halves_only, reasons
from lib_rocm_sd.ops.gradients import gradient_refusals
from lib_rocm_sd.ops.in_triton import triton_refusals
from lib_rocm_sd.ops.lazily import torch

RUN = "lib_rocm_sd.triton_kernels.attention_run"
MASKS = ("none", "bool", "float16", "bfloat16", "float32")
MOST_HEAD_DIM = 256
REACH = 1 << 31
"""Elements from the first of a head to one that 32 bits do not count."""


class TritonAttention(Variant[AttentionProblem, AttentionInputs]):
    """triton_kernels/attention.py. Triton compiles it on this machine when it is first called."""

    name = "triton"
    untried = True

    def refusals(self, arch: Arch | None, problem: AttentionProblem) -> list[str]:
        p = problem
        return triton_refusals(arch, RUN) or reasons(
            halves_only(p.dtype),
            (p.mask not in MASKS, f"a {p.mask} mask: it takes {', '.join(MASKS[1:])}"),
            (p.head_dim > MOST_HEAD_DIM, f"head_dim {p.head_dim}: it takes up to {MOST_HEAD_DIM}"),
            (p.seq_q * p.heads * p.head_dim >= REACH, f"{p.seq_q} queries are too many"),
        )

    def input_refusals(self, inputs: AttentionInputs) -> list[str]:
        q, k, v, mask, _ = inputs
        named = [("q", q), ("k", k), ("v", v)]
        far = [name for name, t in named if t.shape[3] > 1 and t.stride(3) != 1]
        long = [name for name, t in named if (t.shape[1] - 1) * t.stride(1) + t.shape[3] >= REACH]
        if mask is not None:
            full = expand_mask(mask, q, k)
            last = sum((full.shape[axis] - 1) * full.stride(axis) for axis in (2, 3))
            long += ["the mask"] if last >= REACH else []
        return reasons(
            (far, f"the last stride of {', '.join(far)} is not 1"),
            (long, f"a head of {', '.join(long)} reaches over 2^31 elements"),
        ) + gradient_refusals(*inputs[:4])

    def configs(self, arch: Arch | None, problem: AttentionProblem) -> Sequence[Any]:
        if optional.absent("triton", RUN):
            return (None,)
        found: Sequence[Any] = optional.module(RUN).configs(problem.head_dim)
        return found

    def run(self, call: Call[AttentionProblem, AttentionInputs]) -> torch.Tensor:
        q, k, v, mask, scale = call.inputs
        full = None if mask is None else expand_mask(mask, q, k)
        made: torch.Tensor = optional.module(RUN).run(
            call.config, q, k, v, full, scale_of(q, scale)
        )
        return made
