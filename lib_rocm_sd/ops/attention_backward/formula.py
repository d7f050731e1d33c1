"""The gradients of attention by torch's operators; the float64 reference."""

from __future__ import annotations

import math

import torch

from lib_rocm_sd.ops.attention.formula import expand_mask, scale_of
from lib_rocm_sd.ops.attention_backward.problem import AttentionBackwardInputs, Grads


def weights_of(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Softmax of the scores of (B, H, S, D) inputs; zeros for a query without keys."""
    scores = (q @ k.transpose(-1, -2)) * scale
    if mask is None:
        return scores.softmax(-1)
    bias = mask
    if mask.dtype == torch.bool:
        bias = torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(~mask, -math.inf)
    scores = scores + bias.to(scores.dtype)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(empty, 0.0)


def grads_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> Grads:
    """Of q, k and v for that of the output, all (B, H, S, D), in their dtype."""
    weights = weights_of(q, k, mask, scale)
    of_weights = grad @ v.transpose(-1, -2)
    delta = (weights * of_weights).sum(-1, keepdim=True)
    of_scores = weights * (of_weights - delta) * scale
    return (
        of_scores @ k,
        of_scores.transpose(-1, -2) @ q,
        weights.transpose(-1, -2) @ grad,
    )


def by_heads(inputs: AttentionBackwardInputs, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k, v and grad as (B, H, S, D) in this dtype."""
    grad = inputs.grad.unflatten(2, inputs.q.shape[2:])
    return tuple(t.to(dtype).transpose(1, 2) for t in (*inputs[:3], grad))


def formula(inputs: AttentionBackwardInputs, dtype: torch.dtype) -> Grads:
    """All of it at once in this dtype, (B, S, H, D) each. What `output` holds is computed anew."""
    q, k, v, grad = by_heads(inputs, dtype)
    mask = inputs.mask
    if mask is not None:
        mask = expand_mask(mask, inputs.q, inputs.k)
    made = grads_of(q, k, v, grad, mask, scale_of(inputs.q, inputs.scale))
    of_q, of_k, of_v = (t.transpose(1, 2) for t in made)
    return of_q, of_k, of_v


def reference(inputs: AttentionBackwardInputs) -> Grads:
    """In float64, holding all scores: for tests and self-tests."""
    return formula(inputs, torch.float64)
