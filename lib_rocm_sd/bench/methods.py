"""The attention methods that WebUI users pick, written anew from their description, to compare.

"Doggettx-like": the heads are copied to (B*H, S, D); whole rows of scores for as many queries at
a time as free memory holds, in the inputs' dtype. "sub-quadratic-like": the same copies; chunks of
1024 queries, and, where a chunk's scores against all keys do not fit, chunks of about sqrt(Sk)
keys, put together by their largest scores and sums.
"""

from __future__ import annotations

import math

import torch

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.engine.memory import free_bytes
from lib_rocm_sd.ops.attention.formula import scale_of
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Call, Variant, reasons

MOST_SLICES = 64
SCORE_COPIES = 3.0
"""Times the score matrix that the first method counts on: scores, softmax and what is on its way.
"""
QUERY_CHUNK = 1024
ALLOWANCE = 4.0
"""Times the op's tolerance that their error may be: scores are rounded to the inputs' dtype."""
SHARE = 0.7
"""Share of free memory that the scores of a query chunk against all keys may take."""


class _HostMethod(Variant[AttentionProblem, AttentionInputs]):
    """Attention over (B*H, S, D) copies of the heads."""

    def refusals(self, arch: Arch | None, problem: AttentionProblem) -> list[str]:
        return reasons((problem.mask != "none", "written for the comparison, without masks"))

    def run(self, call: Call[AttentionProblem, AttentionInputs]) -> torch.Tensor:
        q, k, v, _, scale = call.inputs
        batch, seq_q, heads, head_dim = q.shape
        free = free_bytes(q.device)
        queries, keys, values = (_heads_first(tensor) for tensor in (q, k, v))
        out = self._attend(queries, keys, values, scale_of(q, scale), free)
        out = out.view(batch, heads, seq_q, head_dim).transpose(1, 2)
        return out.reshape(batch, seq_q, heads * head_dim)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, free: int
    ) -> torch.Tensor:
        raise NotImplementedError


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    """(B, S, H, D) -> (B*H, S, D), contiguous."""
    return tensor.transpose(1, 2).flatten(0, 1).contiguous()


class DoggettxLike(_HostMethod):
    """Slices of queries, each with all its scores, no more slices than free memory asks for."""

    name = "Doggettx-like"

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, free: int
    ) -> torch.Tensor:
        scores_bytes = q.shape[0] * q.shape[1] * k.shape[1] * q.element_size()
        times = math.ceil(SCORE_COPIES * scores_bytes / max(free, 1))
        slices = min(MOST_SLICES, 1 << (max(times, 1) - 1).bit_length())
        rows = max(1, -(-q.shape[1] // slices))
        keys = (k * scale).transpose(1, 2)
        out = torch.empty_like(q)
        for first in range(0, q.shape[1], rows):
            part = slice(first, first + rows)
            scores = torch.bmm(q[:, part], keys)
            weights = scores.softmax(-1)
            del scores
            torch.bmm(weights, v, out=out[:, part])
        return out


class SubQuadraticLike(_HostMethod):
    """Chunks of queries, and of keys where memory asks for it."""

    name = "sub-quadratic-like"

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, free: int
    ) -> torch.Tensor:
        rows = min(QUERY_CHUNK, q.shape[1])
        chunk_bytes = q.shape[0] * rows * k.shape[1] * q.element_size()
        keys = k.shape[1] if chunk_bytes <= SHARE * free else math.isqrt(k.shape[1])
        made = [
            _chunk(q[:, first : first + rows], k, v, scale, max(keys, 1))
            for first in range(0, q.shape[1], rows)
        ]
        return made[0] if len(made) == 1 else torch.cat(made, 1)


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, keys: int
) -> torch.Tensor:
    """The output of a chunk of queries over chunks of `keys`."""
    if keys >= k.shape[1]:
        return torch.bmm(_scores(q, k, scale).softmax(-1), v)
    out = total = top = None
    for first in range(0, k.shape[1], keys):
        part = slice(first, first + keys)
        scores = _scores(q, k[:, part], scale)
        highest = scores.amax(-1, keepdim=True)
        weights = (scores - highest).exp_()
        made, weight = torch.bmm(weights, v[:, part]).float(), weights.float().sum(-1, True)
        highest = highest.float()
        if out is None or total is None or top is None:
            out, total, top = made, weight, highest
            continue
        both = torch.maximum(top, highest)
        before, now = (top - both).exp(), (highest - both).exp()
        out, total, top = out * before + made * now, total * before + weight * now, both
    if out is None or total is None:
        raise ValueError("attention over no keys")
    return (out / total).to(q.dtype)


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """scale q k^T; the product is scaled as it is made, as it is in fp16."""
    empty = q.new_empty((1, 1, 1)).expand(q.shape[0], q.shape[1], k.shape[1])
    return torch.baddbmm(empty, q, k.transpose(1, 2), beta=0, alpha=scale)


METHODS: tuple[Variant[AttentionProblem, AttentionInputs], ...] = (
    DoggettxLike(),
    SubQuadraticLike(),
)
"""Beside the op's own variants, for benchmarks only."""
