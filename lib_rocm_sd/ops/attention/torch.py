"""Attention by torch's operators: what runs where no kernel of ours does."""

from __future__ import annotations

from lib_rocm_sd.ops.attention.formula import attend, expand_mask, scale_of
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Call, Variant
from lib_rocm_sd.ops.lazily import F, torch

SLICE_BYTES = 64 << 20
"""Most scores that SlicedAttention holds at a time, as long as one query's fit."""


class SdpaAttention(Variant[AttentionProblem, AttentionInputs]):
    """torch's scaled_dot_product_attention, whichever backend torch picks."""

    name = "sdpa"
    preference = 10

    def workspace(self, problem: AttentionProblem) -> int:
        """The score matrix: torch holds it where it has no fused backend for a card."""
        return problem.score_bytes

    def run(self, call: Call[AttentionProblem, AttentionInputs]) -> torch.Tensor:
        q, k, v, mask, scale = call.inputs
        if mask is not None:
            mask = expand_mask(mask, q, k)
            mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return out.transpose(1, 2).flatten(2)


class SlicedAttention(Variant[AttentionProblem, AttentionInputs]):
    """The formula in float32 over slices of queries, with at most SLICE_BYTES of scores at a time.

    Runs everywhere.
    """

    name = "sliced"
    derives = True

    @staticmethod
    def slice_rows(problem: AttentionProblem) -> int:
        """Queries per slice; at least one."""
        return max(1, min(problem.seq_q, SLICE_BYTES // (problem.heads * problem.seq_k * 4)))

    def workspace(self, problem: AttentionProblem) -> int:
        p = problem
        keys = 2 * p.heads * p.seq_k * p.head_dim * 4
        return keys + self.slice_rows(p) * p.heads * (2 * p.seq_k + 2 * p.head_dim) * 4

    def run(self, call: Call[AttentionProblem, AttentionInputs]) -> torch.Tensor:
        q, k, v, mask, scale = call.inputs
        rows = self.slice_rows(call.problem)
        compute = torch.promote_types(q.dtype, torch.float32)
        mask = None if mask is None else expand_mask(mask, q, k)
        images = []
        for b in range(q.shape[0]):
            keys, values = (t[b].transpose(0, 1).to(compute) for t in (k, v))
            slices = []
            for i in range(0, q.shape[1], rows):
                queries = q[b, i : i + rows].transpose(0, 1).to(compute)
                part = None if mask is None else mask[b, :, i : i + rows]
                out = attend(queries, keys, values, part, scale_of(q, scale))
                slices.append(out.transpose(0, 1).to(q.dtype))
            images.append(torch.cat(slices))
        return torch.stack(images).flatten(2)
