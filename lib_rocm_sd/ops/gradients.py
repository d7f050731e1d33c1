"""Who follows a call, so that no kernel can serve it; and what norms' gradients are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

from lib_rocm_sd.ops.base import norm_tolerance, reasons
from lib_rocm_sd.ops.dtypes import DTYPES
from lib_rocm_sd.ops.lazily import torch

NormGradients: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]"
"""Gradients of x and, where they are wanted, of gamma and beta, else None."""


def empty_gradients(problem: Any, of_x: torch.Tensor) -> NormGradients:
    """Those of a norm's problem, without values."""
    if not problem.wanted:
        return of_x, None, None
    dtype = DTYPES[problem.affine_dtype]
    of_gamma, of_beta = (of_x.new_empty(problem.channels, dtype=dtype) for _ in range(2))
    return of_x, of_gamma, of_beta


def gradient_tolerance(problem: Any) -> float:
    """`Op.tolerance` of a norm's gradients: that of the norm, of their coarser dtype."""
    dtypes = (problem.dtype, problem.affine_dtype)
    return max(norm_tolerance(replace(problem, dtype=dtype)) for dtype in dtypes)


def is_transformed() -> bool:
    """Whether torch.func (vmap, grad, jvp) transforms what is computed now, or tangents may come
    with it, which is differentiation in forward mode. Engine.run asks the same without a call.
    """
    innermost = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
    transformed = innermost is not None and innermost() is not None
    return transformed or torch.autograd.forward_ad._current_level >= 0


def is_wanted(*inputs: Any) -> bool:
    """Whether the gradient of any tensor among `inputs` is wanted."""
    return torch.is_grad_enabled() and any(
        isinstance(item, torch.Tensor) and item.requires_grad for item in inputs
    )


def gradient_refusals(*inputs: Any) -> list[str]:
    """A reason where the gradient of any tensor among `inputs` is wanted."""
    return reasons((is_wanted(*inputs), "gradients are wanted, the kernel is forward only"))
