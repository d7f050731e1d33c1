"""What tells calls apart, and what every op asks of its inputs."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from lib_rocm_sd.ops.lazily import torch


def key_of(inputs: tuple[Any, ...]) -> Hashable:
    """The key of a call whose problem, checks and refusals follow from how its tensors lie, from
    whether their gradients are wanted, and from its plain values, numpy's too; of floats, such as
    eps, it counts only that they are there. All strides are in it: a bound launch counts on them.
    """
    graded = torch.is_grad_enabled()
    parts: list[Any] = [graded]
    for item in inputs:
        if isinstance(item, torch.Tensor):
            parts += (item.shape, item.stride(), item.dtype, item.device)
            parts.append(graded and item.requires_grad)
        else:
            # A mistake, such as a list, is told by the problem.
            is_plain = type(item).__hash__ is not None and not isinstance(item, (float, tuple))
            parts.append(item if is_plain else type(item))
    return tuple(parts)


def tensors_of(inputs: Any) -> list[torch.Tensor]:
    """Those among an op's inputs, and in tuples among these."""
    found: list[torch.Tensor] = []
    for item in inputs:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif type(item) is tuple:
            found += tensors_of(item)
    return found


def tensor_errors(**tensors: Any) -> list[str]:
    """What cannot be read: what is no tensor, a sparse one, one without memory."""
    wrong = []
    for name, item in tensors.items():
        if not isinstance(item, torch.Tensor):
            wrong.append(f"{name} must be a tensor, not {type(item).__name__}")
        elif item.layout != torch.strided:
            wrong.append(f"{name} is {str(item.layout).removeprefix('torch.')}, not dense")
        elif item.device.type == "meta":
            wrong.append(f"{name} is on the meta device, which has no values")
    return wrong


def described(**tensors: torch.Tensor | None) -> str:
    """Shapes, dtypes and devices, for messages."""
    return ", ".join(
        f"{name} {tuple(t.shape)} {t.dtype} {t.device}"
        if isinstance(t, torch.Tensor)
        else f"{name} {type(t).__name__}"
        for name, t in tensors.items()
        if t is not None
    )
