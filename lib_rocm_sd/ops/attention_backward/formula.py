"""The gradients of attention by torch's operators; the float64 reference."""

from __future__ import annotations

from lib_rocm_sd.ops.attention.formula import expand_mask, scale_of, weights_of
from lib_rocm_sd.ops.attention_backward.inputs import AttentionBackwardInputs, Grads
from lib_rocm_sd.ops.lazily import torch


def grads_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> Grads:
    """Gradients of q, k and v from the output's gradient, all (B, H, S, D), in their dtype."""
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
    gradients = grads_of(q, k, v, grad, mask, scale_of(inputs.q, inputs.scale))
    of_q, of_k, of_v = (t.transpose(1, 2) for t in gradients)
    return of_q, of_k, of_v


def reference(inputs: AttentionBackwardInputs) -> Grads:
    """In float64, holding all scores: for tests and self-tests."""
    return formula(inputs, torch.float64)
