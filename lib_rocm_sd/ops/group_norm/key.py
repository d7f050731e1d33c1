"""What tells calls of GroupNorm and its steps apart.

All strides are in it: a bound launch counts on them. Written out, because a picture asks it
thousands of times.
"""

from __future__ import annotations

from collections.abc import Hashable

from lib_rocm_sd.ops.group_norm.inputs import (
    ApplyInputs,
    FinalizeInputs,
    GroupNormInputs,
    ImageInputs,
    NormInputs,
)
from lib_rocm_sd.ops.lazily import torch


def of_image(inputs: ImageInputs) -> Hashable:
    """Key of a call for statistics."""
    (x,) = inputs
    wanted = torch.is_grad_enabled() and (x.requires_grad,)
    return (x.shape, x.stride(), x.dtype, x.device, wanted)


def of_apply(inputs: ApplyInputs) -> Hashable:
    """Key of a call that applies a norm."""
    x, norm, silu = inputs
    return (
        *(x.shape, x.stride(), x.dtype, x.device),
        *(norm.shape, norm.stride(), norm.dtype, norm.device, silu),
        torch.is_grad_enabled() and (x.requires_grad, norm.requires_grad),
    )


def of_norm(inputs: NormInputs | FinalizeInputs) -> Hashable:
    """Key of a call for the norm of an image, or of statistics."""
    x, gamma, beta, groups, _ = inputs
    wanted = torch.is_grad_enabled() and tuple(
        t is not None and t.requires_grad for t in (x, gamma, beta)
    )
    return (
        *(x.shape, x.stride(), x.dtype, x.device),
        gamma is None or (gamma.shape, gamma.stride(), gamma.dtype, gamma.device),
        beta is None or (beta.shape, beta.stride(), beta.dtype, beta.device),
        *(groups, wanted),
    )


def of_group_norm(inputs: GroupNormInputs) -> Hashable:
    """Key of a call of a whole GroupNorm."""
    added = inputs.added
    return (
        of_norm(inputs[:5]),  # type: ignore[arg-type]
        inputs.silu,
        added is None or (added.shape, added.stride(), added.dtype, added.device),
        added is not None and torch.is_grad_enabled() and added.requires_grad,
    )
