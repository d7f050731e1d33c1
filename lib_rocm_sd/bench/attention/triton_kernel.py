"""Flash attention, forward, in Triton, written for comparisons. Needs Triton.

Method: Dao, FlashAttention-2 (2023), as Triton's users write it: a program takes `block_m` queries
of one head and walks over the keys, `block_n` at a time, whole tiles first; softmax in base 2.
Tiles of Triton are powers of two, so head_dim 40 takes 64 columns and 80 takes 128.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl


@triton.jit
def add_tile(  # type: ignore[no-untyped-def]
    acc, largest, total, queries, k, v, k_row, v_row, first, seq_k, scale,
    head_dim: tl.constexpr, columns: tl.constexpr, block_n: tl.constexpr, tail: tl.constexpr,
):  # fmt: skip
    """One tile of keys."""
    keys = first + tl.arange(0, block_n)
    column = tl.arange(0, columns)
    k_at = k + keys[None, :] * k_row + column[:, None]
    v_at = v + keys[:, None] * v_row + column[None, :]
    if tail:
        k_tile = tl.load(k_at, (keys[None, :] < seq_k) & (column[:, None] < head_dim), other=0.0)
        v_tile = tl.load(v_at, (keys[:, None] < seq_k) & (column[None, :] < head_dim), other=0.0)
    elif columns != head_dim:
        k_tile = tl.load(k_at, column[:, None] < head_dim, other=0.0)
        v_tile = tl.load(v_at, column[None, :] < head_dim, other=0.0)
    else:
        k_tile = tl.load(k_at)
        v_tile = tl.load(v_at)
    scores = tl.dot(queries, k_tile)
    if tail:
        scores = tl.where(keys[None, :] < seq_k, scores, float("-inf"))
    new = tl.maximum(largest, tl.max(scores, 1) * scale)
    weights = tl.math.exp2(scores * scale - new[:, None])
    shrink = tl.math.exp2(largest - new)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * shrink[:, None])
    return acc, new, total


@triton.jit(do_not_specialize=["heads", "seq_q", "q_blocks"])
def attention(  # type: ignore[no-untyped-def]
    q, k, v, out, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    heads, seq_q, seq_k, q_blocks, scale,
    head_dim: tl.constexpr, columns: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
    tail: tl.constexpr,
):  # fmt: skip
    """(B, S, H, D) by strides -> (B, Sq, H * D). `tail`: keys need not be whole tiles."""
    block = tl.program_id(0)
    first_q = block % q_blocks * block_m
    head = block // q_blocks % heads
    batch = block // q_blocks // heads
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    row = first_q + tl.arange(0, block_m)
    column = tl.arange(0, columns)
    inside = (row[:, None] < seq_q) & (column[None, :] < head_dim)
    queries = tl.load(q + row[:, None] * q_row + column[None, :], inside, other=0.0)
    acc = tl.zeros([block_m, columns], tl.float32)
    largest = tl.full([block_m], float("-inf"), tl.float32)
    total = tl.zeros([block_m], tl.float32)
    whole = seq_k // block_n * block_n
    for first in range(0, whole, block_n):
        acc, largest, total = add_tile(
            acc, largest, total, queries, k, v, k_row, v_row, first, seq_k, scale,
            head_dim, columns, block_n, False,
        )  # fmt: skip
    if tail:  # noqa: SIM102 - decided by the compiler, the other by the kernel
        if whole < seq_k:
            acc, largest, total = add_tile(
                acc, largest, total, queries, k, v, k_row, v_row, whole, seq_k, scale,
                head_dim, columns, block_n, True,
            )  # fmt: skip
    acc = acc / total[:, None]
    at = ((batch * seq_q + row[:, None]) * heads + head) * head_dim + column[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), inside)


@dataclass(frozen=True)
class TritonConfig:
    """Tile sizes, waves and pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}, {self.num_warps} waves, {self.num_stages} stages"


def columns_of(head_dim: int) -> int:
    """How many columns of a head the kernel computes with."""
    return max(16, int(triton.next_power_of_2(head_dim)))
