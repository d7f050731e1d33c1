"""RMSNorm over the channels of each pixel, as VAEs of video models have it, by torch's operators.

It needs nothing of other pixels, so a band is normalised as the whole image is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

CHUNK_BYTES = 32 << 20
"""Largest size of the rows that are normalised together; two copies of them are wider."""


@dataclass(frozen=True, eq=False)
class PixelNorm:
    """`gamma` (C), float32 or wider, times sqrt(C). A pixel shorter than `eps` is divided by it."""

    gamma: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor, silu: bool) -> torch.Tensor:
        """x (N, H, W, C) normalised, then perhaps SiLU, computed wide and rounded once."""
        made = torch.empty_like(x)
        step = _chunk_rows(x[:, :1].nbytes)
        for first in range(0, x.shape[1], step):
            part = x[:, first : first + step].to(self.gamma.dtype)
            length = torch.linalg.vector_norm(part, dim=-1, keepdim=True).clamp_min(self.eps)
            part = (part / length).mul_(self.gamma)
            made[:, first : first + step] = F.silu(part, inplace=True) if silu else part
        return made


def _chunk_rows(row_bytes: int) -> int:
    return max(CHUNK_BYTES // max(row_bytes, 1), 1)


def workspace_bytes(rows: int, row_bytes: int, itemsize: int) -> int:
    """Bytes that normalising needs beside x, the result included."""
    wide = 2 * max(4 // itemsize, 1)
    return (rows + wide * min(rows, _chunk_rows(row_bytes))) * row_bytes
