"""Runs triton_kernel.py on torch's tensors. Needs Triton and a GPU that it knows."""

from __future__ import annotations

import math
import subprocess
from contextlib import nullcontext

import torch
import triton

from lib_rocm_sd.bench.attention.triton_kernel import TritonConfig, attention, columns_of

LOG2_E = math.log2(math.e)
CONFIGS = {
    64: (TritonConfig(128, 64, 4, 3), TritonConfig(128, 128, 8, 3)),
    128: (TritonConfig(128, 64, 8, 3), TritonConfig(128, 128, 8, 2)),
    256: (TritonConfig(128, 64, 8, 2), TritonConfig(64, 32, 4, 2)),
    512: (TritonConfig(64, 32, 8, 2), TritonConfig(32, 32, 4, 1)),
}
"""By the columns that a head takes, up to this many: few, since each is compiled in a second."""
FAILED: tuple[type[Exception], ...] = (
    *(triton.CompilationError, triton.OutOfResources, subprocess.SubprocessError),
    *filter(None, [getattr(triton, "TritonError", None)]),
)
"""What Triton and the compilers that it calls raise, besides RuntimeError."""


def configs(head_dim: int) -> tuple[TritonConfig, ...]:
    """What is tried for a head_dim."""
    columns = columns_of(head_dim)
    return next((CONFIGS[most] for most in CONFIGS if columns <= most), CONFIGS[512])


def run(
    config: TritonConfig, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """(B, Sq, H*D) for q (B, Sq, H, D), k and v (B, Sk, H, D), last stride 1.

    RuntimeError where Triton cannot.
    """
    batch, seq_q, heads, head_dim = q.shape
    seq_k = k.shape[1]
    out = q.new_empty((batch, seq_q, heads * head_dim))
    q_blocks = -(-seq_q // config.block_m)
    strides = (stride for tensor in (q, k, v) for stride in tensor.stride()[:3])
    factor = (head_dim**-0.5 if scale is None else scale) * LOG2_E
    try:
        with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
            attention[(q_blocks * heads * batch,)](
                *(q, k, v, out, *strides, heads, seq_q, seq_k, q_blocks, factor),
                head_dim=head_dim,
                columns=columns_of(head_dim),
                block_m=config.block_m,
                block_n=config.block_n,
                tail=seq_k % config.block_n != 0,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
    except FAILED as error:
        raise RuntimeError(f"Triton, {config}: {error}") from error
    return out
