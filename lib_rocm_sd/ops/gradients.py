"""Who follows a call, so that no kernel can serve it; said in one place for all ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from lib_rocm_sd.ops.base import reasons

is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)
"""True while torch.compile traces. A torch that cannot tell breaks its graph here instead."""
innermost_transform: Callable[[], Any] = getattr(
    getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None
)


def is_transformed() -> bool:
    """Whether torch.func (vmap, grad, jvp) transforms what is computed now, or tangents may come
    with it, which is differentiation in forward mode. Engine.run asks the same without a call.
    """
    return innermost_transform() is not None or forward_ad._current_level >= 0


def is_wanted(*inputs: Any) -> bool:
    """Whether the gradient of any tensor among `inputs` is wanted."""
    return torch.is_grad_enabled() and any(
        isinstance(item, torch.Tensor) and item.requires_grad for item in inputs
    )


def gradient_refusals(*inputs: Any) -> list[str]:
    """A reason where the gradient of any tensor among `inputs` is wanted."""
    return reasons((is_wanted(*inputs), "gradients are wanted, the kernel is forward only"))
