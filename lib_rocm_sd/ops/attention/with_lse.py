"""Attention for a backward pass: beside the output, the log-sum-exp of each query's logits.

The log-sum-exp (B, H, Sq) of scale q k^T + mask over the keys is in base 2, log2(sum e^logit), and
float32, or float64 for float64 inputs. It is 0 for a query whose keys are all masked, and infinite
for one beyond LARGEST, as where all its keys have a bias of -1e9: float32 then has no place for the
sum. Both get zeros for gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.attention import formula, kernel
from lib_rocm_sd.ops.attention.formula import expand_mask, logits_of, scale_of
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.kernel import AttentionConfig
from lib_rocm_sd.ops.attention.ours import LOG2_E, MatrixAttention
from lib_rocm_sd.ops.attention.problem import AttentionProblem, output_shape
from lib_rocm_sd.ops.attention.torch import SdpaAttention, SlicedAttention
from lib_rocm_sd.ops.base import Call, KernelSpec, Run, Variant
from lib_rocm_sd.ops.lazily import torch

LARGEST = 100_000.0
"""Largest finite log-sum-exp: up to it, its rounding changes a weight less than rounding to
bfloat16 does.
"""
Both: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""The output (B, Sq, H*D), and the log-sum-exp."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """That of the log-sum-exp for inputs of this dtype."""
    return torch.promote_types(dtype, torch.float32)


def lse_shape(problem: AttentionProblem) -> tuple[int, int, int]:
    """(batch, heads, seq_q)."""
    return (problem.batch, problem.heads, problem.seq_q)


def empty(problem: AttentionProblem, inputs: AttentionInputs) -> Both:
    """Results without values."""
    q = inputs.q
    return q.new_empty(output_shape(problem)), q.new_empty(lse_shape(problem), dtype=wide(q.dtype))


def reference(inputs: AttentionInputs) -> Both:
    """In float64, holding all scores."""
    q, k, _, mask, scale = inputs
    queries, keys = (t.double().transpose(1, 2) for t in (q, k))
    mask = None if mask is None else expand_mask(mask, q, k)
    return formula.reference(inputs), _lse(queries, keys, mask, scale_of(q, scale))


def lse_of(inputs: AttentionInputs, problem: AttentionProblem) -> torch.Tensor:
    """By torch's operators, in slices of queries."""
    q, k, _, mask, scale = inputs
    if not (q.numel() and k.numel()):
        return q.new_zeros(lse_shape(problem), dtype=wide(q.dtype))
    queries, keys = (t.transpose(1, 2).to(wide(q.dtype)) for t in (q, k))
    mask = None if mask is None else expand_mask(mask, q, k)
    rows, images = SlicedAttention.slice_rows(problem), []
    for b in range(problem.batch):
        parts = []
        for first in range(0, problem.seq_q, rows):
            part = slice(first, first + rows)
            masked = None if mask is None else mask[b, :, part]
            parts.append(_lse(queries[b, :, part], keys[b], masked, scale_of(q, scale)))
        images.append(torch.cat(parts, 1))
    return torch.stack(images)


def _lse(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Log-sum-exp, in base 2, of (.., S, D) inputs."""
    logits = logits_of(q, k, mask, scale)
    if mask is None:
        return _limited(logits.logsumexp(-1))
    empty = (logits == -math.inf).all(-1, keepdim=True)
    found = logits.masked_fill(empty, 0.0).logsumexp(-1).masked_fill(empty[..., 0], 0.0)
    return _limited(found)


def _limited(natural: torch.Tensor) -> torch.Tensor:
    """In base 2."""
    found = natural * LOG2_E
    return found.masked_fill(found.abs() > LARGEST, math.inf)


class MatrixForward(MatrixAttention):
    """kernels/attention.hip, compiled so that it leaves the log-sum-exp."""

    def spec(self, problem: AttentionProblem, config: AttentionConfig) -> KernelSpec:
        p = problem
        return kernel.spec(p.dtype, p.head_dim, p.mask, config, lse=True)

    def bound(self, call: Call[AttentionProblem, AttentionInputs]) -> Run:
        return self.run

    def run(  # type: ignore[override]
        self, call: Call[AttentionProblem, AttentionInputs]
    ) -> Both:
        lse = call.inputs.q.new_empty(lse_shape(call.problem), dtype=torch.float32)
        return self.launched(call, lse), lse


class TorchForward(Variant[AttentionProblem, AttentionInputs]):
    """A variant of torch's, and the log-sum-exp of scores that are made once more."""

    def __init__(self, output: SdpaAttention | SlicedAttention) -> None:
        self._output = output
        self.name, self.preference, self.derives = output.name, output.preference, output.derives

    def refusals(self, arch: Arch | None, problem: AttentionProblem) -> list[str]:
        return self._output.refusals(arch, problem)

    def workspace(self, problem: AttentionProblem) -> int:
        p = problem
        keys = 2 * p.batch * p.heads * (p.seq_q + p.seq_k) * p.head_dim * 4
        scores = 2 * SlicedAttention.slice_rows(p) * p.heads * p.seq_k * 4
        return max(self._output.workspace(p), keys + scores)

    def run(self, call: Call[AttentionProblem, AttentionInputs]) -> Both:
        return self._output.run(call), lse_of(call.inputs, call.problem)


VARIANTS: Sequence[Variant[AttentionProblem, AttentionInputs]] = (
    MatrixForward(),
    TorchForward(SdpaAttention()),
    TorchForward(SlicedAttention()),
)
