"""Attention to compare with: methods that WebUI users pick, AMD's loops, and what is exact.

"Doggettx-like" and "sub-quadratic-like" are written anew from their description. The former: the
heads are copied to (B*H, S, D); whole rows of scores for as many queries at a time as free memory
holds, in the inputs' dtype. The latter: the same copies; chunks of 1024 queries, and, where a
chunk's scores against all keys do not fit, chunks of about sqrt(Sk) keys, put together by their
largest scores and sums.

`AmdLoops` are those loops of attention.hip that AMD runs, on an NVIDIA card, for benchmarks and
tests only. Up to head_dim 256, and with `ahead` at 512, rocm_sd runs loops there whose tiles are
copied to LDS without passing registers, which no AMD card can do. These are the others, with the
tiles of gfx1100, whose waves have 32 lanes too. The matrix unit stays NVIDIA's, and with it how V
lies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lib_rocm_sd.arch import Arch, table
from lib_rocm_sd.engine.memory import free_bytes
from lib_rocm_sd.ops.attention.formula import scale_of
from lib_rocm_sd.ops.attention.inputs import AttentionInputs, problem_of
from lib_rocm_sd.ops.attention.kernel import AttentionConfig
from lib_rocm_sd.ops.attention.ours import MatrixAttention
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention.torch import SlicedAttention
from lib_rocm_sd.ops.base import Call, KernelSpec, Variant, reasons

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
        # (B, S, H, D) to (B*H, S, D)
        queries, keys, values = (t.transpose(1, 2).flatten(0, 1).contiguous() for t in (q, k, v))
        out = self._attend(queries, keys, values, scale_of(q, scale), free)
        out = out.view(batch, heads, seq_q, head_dim).transpose(1, 2)
        return out.reshape(batch, seq_q, heads * head_dim)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, free: int
    ) -> torch.Tensor:
        raise NotImplementedError


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
        parts = [
            _chunk(q[:, first : first + rows], k, v, scale, max(keys, 1))
            for first in range(0, q.shape[1], rows)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


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
        values, weight = torch.bmm(weights, v[:, part]).float(), weights.float().sum(-1, True)
        highest = highest.float()
        if out is None or total is None or top is None:
            out, total, top = values, weight, highest
            continue
        both = torch.maximum(top, highest)
        before, now = (top - both).exp(), (highest - both).exp()
        out, total, top = out * before + values * now, total * before + weight * now, both
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


# -- AMD's loops ----------------------------------------------------------------------------------


CONFIGS_OF = "gfx1100"


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
        spec = super().spec(problem, config)
        return replace(spec, defines=(*spec.defines, ("AMD_LOOPS", 1)))


# -- what is exact --------------------------------------------------------------------------------


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


def expected(
    inputs: AttentionInputs, problem: AttentionProblem, places: torch.Tensor | None = None
) -> Exact:
    """What outputs are compared with: of the queries at `places`, by default of all, or of some of
    a large problem's.
    """
    q, k, v, mask, scale = inputs
    p = problem
    if places is None:
        large = p.flops > WHOLE_FLOPS["cuda" if q.is_cuda else "cpu"] and mask is None
        places = _drawn_places(p.seq_q) if large else torch.arange(p.seq_q)
    places = places.to(q.device)
    part = q if places.numel() == p.seq_q else q[:, places]
    values = exact(AttentionInputs(part, k, v, mask, scale))
    return Exact(values, places, (p.batch, p.seq_q, p.heads * p.head_dim))


def _drawn_places(seq_q: int) -> torch.Tensor:
    """CHECKED_QUERIES numbers below seq_q at random places, always the same, with both ends."""
    order = torch.randperm(seq_q, generator=torch.Generator("cpu").manual_seed(SEED))
    ends = torch.tensor([0, seq_q - 1])
    return torch.cat([ends, order[: max(CHECKED_QUERIES, 2)]]).unique()
