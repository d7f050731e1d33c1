"""Runs attention.py on torch's tensors. Needs Triton and a GPU that it knows."""

from __future__ import annotations

import math

import torch

from lib_rocm_sd.triton_kernels.attention import (
    ADDED,
    BOOL,
    LEAST_COLUMNS,
    NO_MASK,
    TritonConfig,
    attention,
    pieces,
)
from lib_rocm_sd.triton_kernels.launching import launching

LOG2_E = math.log2(math.e)
CONFIGS = {
    64: (TritonConfig(128, 64, 8, 2), TritonConfig(128, 64, 4, 3), TritonConfig(64, 32, 4, 1)),
    128: (TritonConfig(128, 32, 8, 1), TritonConfig(128, 64, 8, 2), TritonConfig(64, 32, 4, 1)),
    256: (TritonConfig(64, 32, 4, 1), TritonConfig(128, 32, 8, 1)),
}
"""By the columns that a head takes, up to this many: few, since each is compiled in a second. The
first spills no registers on gfx1100 at 40, 64, 80 and 128, with Triton 3.9."""


def cut(head_dim: int) -> tuple[int, int]:
    """Columns of a head's two pieces: one piece on NVIDIA. With two, Triton 3.6 makes code for an
    H200 that leaves shared memory or is wrong, where loads are pipelined (compute-sanitizer).
    """
    if torch.version.hip:
        return pieces(head_dim)
    return max(LEAST_COLUMNS, 1 << (head_dim - 1).bit_length()), 0


def configs(head_dim: int) -> tuple[TritonConfig, ...]:
    """What is tried for a head_dim."""
    columns = sum(cut(head_dim))
    return next((CONFIGS[most] for most in CONFIGS if columns <= most), CONFIGS[256])


def run(
    config: TritonConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """(B, Sq, H*D) for q (B, Sq, H, D), k and v (B, Sk, H, D), last stride 1, and a mask (B, H, Sq,
    Sk). RuntimeError where Triton cannot.
    """
    batch, seq_q, heads, head_dim = q.shape
    seq_k = k.shape[1]
    out = q.new_empty((batch, seq_q, heads * head_dim))
    q_blocks = -(-seq_q // config.block_m)
    first, rest = cut(head_dim)
    strides = [stride for tensor in (q, k, v) for stride in tensor.stride()[:3]]
    kind, given = NO_MASK, out
    of_mask: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        kind = BOOL if mask.dtype == torch.bool else ADDED
        given = mask.view(torch.uint8) if kind == BOOL else mask
        of_mask = mask.stride()
    with launching(q.device, config):
        attention[(q_blocks * heads * batch,)](
            *(q, k, v, out, given, *strides, *of_mask),
            *(heads, seq_q, seq_k, q_blocks, scale * LOG2_E),
            head_dim=head_dim,
            first=first,
            rest=rest,
            block_m=config.block_m,
            block_n=config.block_n,
            kind=kind,
            tail=seq_k % config.block_n != 0,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out
