"""The mid-block's attention: keys and values of the whole image, queries a chunk at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lib_rocm_sd import functional
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.vae.steps import Rows
from lib_rocm_sd.vae.weights import ReadyAttention

CHUNK_BYTES = 32 << 20
"""Largest size of a chunk's queries. Beside the image, keys and values, five such are alive."""


def chunk_rows(batch: int, width: int, channels: int, itemsize: int) -> int:
    """Rows of an image whose queries are computed together."""
    return max(CHUNK_BYTES // max(batch * width * channels * itemsize, 1), 1)


def workspace_bytes(batch: int, height: int, width: int, channels: int, itemsize: int) -> int:
    """Bytes that `attend` needs beside x. `channels`: of queries, keys and values."""
    row = batch * width * channels * itemsize
    return 2 * height * row + 5 * min(chunk_rows(batch, width, channels, itemsize), height) * row


def attend(
    ready: ReadyAttention, x: torch.Tensor, norm: torch.Tensor | None, session: Session
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x (N, H, W, C) plus attention over its pixels, in place; and the norm of what it is then."""
    mix(ready, x, norm, (0, x.shape[1]), session)
    return x, norm_after(ready, x, session)


def mix(
    ready: ReadyAttention, x: torch.Tensor, norm: torch.Tensor | None, rows: Rows, session: Session
) -> None:
    """Add attention over all pixels of x (N, H, W, C) to some `rows` of it. `norm`: of a
    GroupNorm; None of an RMSNorm, which `ready` has.
    """
    batch, height, width, channels = x.shape
    step = chunk_rows(batch, width, channels, x.element_size())
    parts = [(first, min(first + step, height)) for first in range(0, height, step)]
    heads = ready.step.heads
    head_dim, own = ready.step.head_dim, channels // heads
    shape = (batch, height * width, heads, head_dim)
    k, v = x.new_empty((2, batch, height, width, heads * head_dim)).unbind(0)

    def normed_rows(first: int, last: int) -> torch.Tensor:
        part = x[:, first:last].contiguous()
        if norm is None:
            assert ready.rms is not None
            return functional.rms_norm(part, *ready.rms, False, session)
        return functional.group_norm_apply(part, norm, False, session)

    for first, last in parts:
        normed = normed_rows(first, last)
        k[:, first:last] = F.linear(normed, *ready.k)
        v[:, first:last] = F.linear(normed, *ready.v)
    for first, last in [(max(first, rows[0]), min(last, rows[1])) for first, last in parts]:
        if first >= last:
            continue
        normed = normed_rows(first, last)
        q = F.linear(normed, *ready.q).view(batch, -1, *shape[2:])
        del normed
        k_seen, v_seen = k.view(shape), v.view(shape)
        mixed = functional.attention(q, k_seen, v_seen, scale=own**-0.5, session=session)
        del q
        x[:, first:last] += F.linear(mixed, *ready.out).view(batch, -1, width, channels)


def norm_after(ready: ReadyAttention, x: torch.Tensor, session: Session) -> torch.Tensor | None:
    """The norm of the whole image for the step that reads it; None where that wants none."""
    following = ready.next_norm
    if following is None:
        return None
    statistics = functional.group_norm_statistics(x, session)
    return functional.group_norm_finalize(
        statistics, following.gamma, following.beta, following.groups, following.eps, session
    )
