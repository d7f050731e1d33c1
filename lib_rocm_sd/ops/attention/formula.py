"""The formula of attention by torch's operators; the float64 reference."""

from __future__ import annotations

import math

from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.lazily import torch


def expand_mask(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The mask as a (B, H, Sq, Sk) view, broadcast dimensions with stride 0. Of key lengths, int32
    (B, 1, 1, 1), one that says which keys count: the first, and always one.
    """
    if mask.dtype == torch.int32:
        mask = torch.arange(k.shape[1], device=mask.device) < mask.clamp(min=1)
    return mask.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])


def scale_of(q: torch.Tensor, scale: float | None) -> float:
    """`scale`, or head_dim ** -0.5 where it is None."""
    return 1.0 / math.sqrt(q.shape[3]) if scale is None else scale


def logits_of(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """The scaled and masked scores of (B, H, S, D) inputs."""
    scores = (q @ k.transpose(-1, -2)) * scale
    if mask is None:
        return scores
    bias = mask
    if mask.dtype == torch.bool:
        bias = torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(~mask, -math.inf)
    return scores + bias.to(scores.dtype)


def weights_of(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Softmax of the scores of (B, H, S, D) inputs; zeros for a query whose keys are all masked,
    with derivatives that are zeros too.
    """
    scores = logits_of(q, k, mask, scale)
    if mask is None:
        return scores.softmax(-1)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Softmax attention in the dtype of (B, H, S, D) inputs."""
    return weights_of(q, k, mask, scale) @ v


def reference(inputs: AttentionInputs) -> torch.Tensor:
    """The formula in float64, (B, Sq, H*D), holding all scores: for tests and self-tests."""
    q, k, v, mask, scale = inputs
    q64, k64, v64 = (t.double().transpose(1, 2) for t in (q, k, v))
    mask = None if mask is None else expand_mask(mask, q, k)
    out = attend(q64, k64, v64, mask, scale_of(q, scale))
    return out.transpose(1, 2).flatten(2)
