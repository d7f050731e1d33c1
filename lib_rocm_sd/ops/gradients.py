"""Why a kernel cannot serve a call that autograd follows; said in one place for all ops."""

from __future__ import annotations

from typing import Any

import torch

from lib_rocm_sd.ops.base import reasons


def is_wanted(*inputs: Any) -> bool:
    """Whether the gradient of any tensor among `inputs` is wanted."""
    return torch.is_grad_enabled() and any(
        isinstance(item, torch.Tensor) and item.requires_grad for item in inputs
    )


def gradient_refusals(*inputs: Any) -> list[str]:
    """A reason where the gradient of any tensor among `inputs` is wanted."""
    return reasons((is_wanted(*inputs), "gradients are wanted, the kernel is forward only"))
