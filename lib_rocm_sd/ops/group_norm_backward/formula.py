"""The gradients of GroupNorm and SiLU by torch's operators in float64: the reference."""

from __future__ import annotations

from lib_rocm_sd.ops.gradients import NormGradients
from lib_rocm_sd.ops.lazily import torch


def reference(
    grad: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
    affine: bool,
) -> NormGradients:
    """Gradients of x, gamma and beta; the latter two None where not wanted."""
    values = x.double().contiguous().unflatten(1, (groups, -1))
    over = (2, 3, 4)
    variance, mean = torch.var_mean(values, over, correction=0, keepdim=True)
    scale = (variance + eps).rsqrt()
    normed = (values - mean) * scale
    width, shift = (
        None if t is None else t.double()[:, None, None].unflatten(0, (groups, -1))
        for t in (gamma, beta)
    )
    z = normed if width is None else normed * width
    z = z if shift is None else z + shift
    g = grad.double().contiguous().unflatten(1, (groups, -1))
    if silu:
        s = z.sigmoid()
        g = g * (s * (1 + z * (1 - s)))
    scaled = g if width is None else g * width
    slope = (scaled * normed).mean(over, keepdim=True)
    made = scale * (scaled - scaled.mean(over, keepdim=True) - normed * slope)
    if not affine:
        return made.flatten(1, 2), None, None
    sums = ((t.flatten(1, 2)).sum((0, 2, 3)) for t in (g * normed, g))
    return made.flatten(1, 2), *sums
