"""What is right, in float64: the whole output, or of a large problem some rows of each head."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lib_rocm_sd.ops.attention.inputs import AttentionInputs, problem_of
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention.torch import SlicedAttention
from lib_rocm_sd.ops.base import Call

CHECKED_QUERIES = 512
"""Random queries checked per head of a large problem, besides the first and the last."""
WHOLE_FLOPS = {"cuda": 2e11, "cpu": 4e9}
"""Above, a problem is large."""
SEED = 20


@dataclass(frozen=True)
class Exact:
    """`values` (batch, queries, heads*head_dim) in float64 of the queries at `places`."""

    values: torch.Tensor
    places: torch.Tensor
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Checked rows of the output, over batch and queries; each has all heads."""
        return self.values.shape[0] * self.values.shape[1]

    def error(self, out: torch.Tensor) -> float:
        """max |out - exact| / max |exact|; infinite where anything in `out` is not finite.

        ValueError for another shape.
        """
        if tuple(out.shape) != self.shape:
            raise ValueError(f"the output is {tuple(out.shape)}, expected {self.shape}")
        if not bool(torch.isfinite(out).all()):
            return math.inf
        gap = (out[:, self.places].double() - self.values).abs().max()
        return float(gap / self.values.abs().max())


def exact(inputs: AttentionInputs) -> torch.Tensor:
    """The result in float64, computed in slices so that a large problem fits."""
    q, k, v, mask, scale = inputs
    wide = AttentionInputs(q.double(), k.double(), v.double(), mask, scale)
    return SlicedAttention().run(Call(problem_of(wide), wide))


def expected(inputs: AttentionInputs, problem: AttentionProblem) -> Exact:
    """What outputs are compared with."""
    q, k, v, mask, scale = inputs
    p = problem
    places = torch.arange(p.seq_q)
    if p.flops > WHOLE_FLOPS["cuda" if q.is_cuda else "cpu"] and mask is None:
        places = _spread(p.seq_q)
    places = places.to(q.device)
    part = q if places.numel() == p.seq_q else q[:, places]
    values = exact(AttentionInputs(part, k, v, mask, scale))
    return Exact(values, places, (p.batch, p.seq_q, p.heads * p.head_dim))


def _spread(seq_q: int) -> torch.Tensor:
    """CHECKED_QUERIES numbers below seq_q at random places, always the same, with both ends."""
    drawn = torch.randperm(seq_q, generator=torch.Generator("cpu").manual_seed(SEED))
    ends = torch.tensor([0, seq_q - 1])
    return torch.cat([ends, drawn[: max(CHECKED_QUERIES, 2)]]).unique()
