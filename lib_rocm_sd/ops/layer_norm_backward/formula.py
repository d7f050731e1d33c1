"""The gradients of LayerNorm by torch's operators in float64: the reference."""

from __future__ import annotations

from lib_rocm_sd.ops.gradients import NormGradients
from lib_rocm_sd.ops.lazily import torch


def reference(
    grad: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    eps: float,
    added: torch.Tensor | None,
    sum_grad: torch.Tensor | None,
    affine: bool,
) -> NormGradients:
    """Gradients of x (and so of `added`), gamma and beta; the latter two None where not wanted."""
    total = x if added is None else (x.double() + added.double()).to(x.dtype)
    values, upper = total.double(), grad.double()
    variance, mean = torch.var_mean(values, -1, correction=0, keepdim=True)
    scale = (variance + eps).rsqrt()
    normed = (values - mean) * scale
    g = upper if gamma is None else upper * gamma.double()
    slope = (g * normed).mean(-1, keepdim=True)
    made = scale * (g - g.mean(-1, keepdim=True) - normed * slope)
    if sum_grad is not None:
        made = made + sum_grad.double()
    if not affine:
        return made, None, None
    rows = (upper * normed).flatten(0, -2), upper.flatten(0, -2)
    return made, rows[0].sum(0), rows[1].sum(0)
