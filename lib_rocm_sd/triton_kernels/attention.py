"""Flash attention, forward, in Triton: out = softmax(scale q k^T + mask) v. Needs Triton.

Method: Dao, FlashAttention-2 (2023). A program takes `block_m` queries of one head and walks over
the keys, `block_n` at a time, whole tiles first; softmax in base 2.

Tiles of Triton are powers of two. A head is cut into a `first` piece and a `rest` where that has
fewer columns than one power of two: 40 is 32 + 16, 80 is 64 + 16, 160 is 128 + 32. Each piece has
its own product for the scores, and its own sum.

A score is scaled before the largest is taken off it. One multiply-add for both (`fused`, as
Triton's own example has it) takes fewer instructions, and from scores of 2^29 on the rounding of
the largest makes weights 0 or infinite. So it is there only to be compared with.

A query whose keys are all masked gives zeros. Within a head offsets have 32 bits; where a head
begins has 64.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

NO_MASK, BOOL, ADDED = 0, 1, 2
LEAST_COLUMNS = 16
"""Fewest columns of a matrix instruction."""


@triton.jit
def add_tile(  # type: ignore[no-untyped-def]
    sums, more, largest, total, q_first, q_rest, k, v, mask, k_row, v_row, mask_column,
    mask_row, row, begin, seq_q, seq_k, scale,
    head_dim: tl.constexpr, first: tl.constexpr, rest: tl.constexpr, block_n: tl.constexpr,
    kind: tl.constexpr, tail: tl.constexpr, fused: tl.constexpr,
):  # fmt: skip
    """One tile of keys, from `begin` on. `tail`: some may lie past the end."""
    keys = begin + tl.arange(0, block_n)
    column = tl.arange(0, first)
    inside = keys < seq_k if tail else keys >= 0
    own = column < head_dim
    k_tile = tl.load(
        k + keys[None, :] * k_row + column[:, None], inside[None, :] & own[:, None], other=0.0
    )
    scores = tl.dot(q_first, k_tile)
    if rest > 0:
        further = first + tl.arange(0, rest)
        ours = further < head_dim
        at = keys[None, :] * k_row + further[:, None]
        k_tile = tl.load(k + at, inside[None, :] & ours[:, None], other=0.0)
        scores = tl.dot(q_rest, k_tile, scores)
    if fused:
        if tail:
            scores = tl.where(inside[None, :], scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1) * scale)
        base = new
        weights = tl.math.exp2(scores * scale - base[:, None])
    else:
        scores = scores * scale
        if kind != 0:
            at = row[:, None] * mask_row + keys[None, :] * mask_column
            there = (row[:, None] < seq_q) & inside[None, :]
            given = tl.load(mask + at, there, other=0)
            if kind == 1:
                scores = tl.where(given != 0, scores, float("-inf"))
            else:
                scores += given.to(tl.float32) * 1.4426950408889634
        if tail:
            scores = tl.where(inside[None, :], scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        base = new
        if kind != 0:
            base = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.math.exp2(scores - base[:, None])
    shrink = tl.math.exp2(largest - base)
    total = total * shrink + tl.sum(weights, 1)
    v_at = keys[:, None] * v_row
    v_tile = tl.load(v + v_at + column[None, :], inside[:, None] & own[None, :], other=0.0)
    weights = weights.to(v_tile.dtype)
    sums = tl.dot(weights, v_tile, sums * shrink[:, None])
    if rest > 0:
        further = first + tl.arange(0, rest)
        ours = further < head_dim
        v_tile = tl.load(v + v_at + further[None, :], inside[:, None] & ours[None, :], other=0.0)
        more = tl.dot(weights, v_tile, more * shrink[:, None])
    return sums, more, new, total


@triton.jit(do_not_specialize=["heads", "seq_q", "q_blocks"])
def attention(  # type: ignore[no-untyped-def]
    q, k, v, out, mask, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    mask_batch, mask_head, mask_row, mask_column, heads, seq_q, seq_k, q_blocks, scale,
    head_dim: tl.constexpr, first: tl.constexpr, rest: tl.constexpr, block_m: tl.constexpr,
    block_n: tl.constexpr, kind: tl.constexpr, tail: tl.constexpr, fused: tl.constexpr = False,
):  # fmt: skip
    """(B, S, H, D) by strides -> (B, Sq, H * D). `scale`: times log2(e). `kind` of mask: 0 none,
    1 bool, 2 added. `fused`, for comparisons: no mask, a scale above 0 and scores below 2^29.
    """
    block = tl.program_id(0)
    head = (block // q_blocks % heads).to(tl.int64)
    batch = (block // q_blocks // heads).to(tl.int64)
    row = block % q_blocks * block_m + tl.arange(0, block_m)
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    if kind != 0:
        mask += batch * mask_batch + head * mask_head
    column = tl.arange(0, first)
    here = row[:, None] < seq_q
    own = here & (column[None, :] < head_dim)
    q_first = tl.load(q + row[:, None] * q_row + column[None, :], own, other=0.0)
    q_rest = q_first
    sums = tl.zeros([block_m, first], tl.float32)
    more = sums
    if rest > 0:
        further = first + tl.arange(0, rest)
        ours = here & (further[None, :] < head_dim)
        q_rest = tl.load(q + row[:, None] * q_row + further[None, :], ours, other=0.0)
        more = tl.zeros([block_m, rest], tl.float32)
    largest = tl.full([block_m], float("-inf"), tl.float32)
    total = tl.zeros([block_m], tl.float32)
    whole = seq_k // block_n * block_n
    for begin in range(0, whole, block_n):
        sums, more, largest, total = add_tile(
            sums, more, largest, total, q_first, q_rest, k, v, mask, k_row, v_row, mask_column,
            mask_row, row, begin, seq_q, seq_k, scale, head_dim, first, rest, block_n, kind, False,
            fused,
        )  # fmt: skip
    if tail:
        sums, more, largest, total = add_tile(
            sums, more, largest, total, q_first, q_rest, k, v, mask, k_row, v_row, mask_column,
            mask_row, row, whole, seq_q, seq_k, scale, head_dim, first, rest, block_n, kind, True,
            fused,
        )  # fmt: skip
    if kind != 0:
        total = tl.where(total == 0.0, 1.0, total)
    out += (batch * seq_q * heads + head) * head_dim
    at = row[:, None] * (heads * head_dim)
    tl.store(out + at + column[None, :], (sums / total[:, None]).to(out.dtype.element_ty), own)
    if rest > 0:
        further = first + tl.arange(0, rest)
        ours = here & (further[None, :] < head_dim)
        made = (more / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + at + further[None, :], made, ours)


@dataclass(frozen=True)
class TritonConfig:
    """Tile sizes, waves and pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}, {self.num_warps} waves, {self.num_stages} stages"


def pieces(head_dim: int) -> tuple[int, int]:
    """Columns of the first piece of a head and of the rest, which may be 0."""
    whole = max(LEAST_COLUMNS, 1 << (head_dim - 1).bit_length())
    first = whole // 2
    rest = max(LEAST_COLUMNS, 1 << (head_dim - first - 1).bit_length()) if head_dim > first else 0
    return (first, rest) if first >= LEAST_COLUMNS and first + rest < whole else (whole, 0)
