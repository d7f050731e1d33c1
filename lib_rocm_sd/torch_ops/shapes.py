"""What an operator gives, without computing it: for tracing, and on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lib_rocm_sd.torch_ops.torch_op import Made, TorchOp


def shapes_of(row: TorchOp, arguments: Sequence[Any]) -> Made:
    """Empty results. A caller's mistake is the ValueError that the engine raises; sizes may be
    symbols.
    """
    if all(item.device.type == "meta" for item in arguments if isinstance(item, torch.Tensor)):
        return _on_meta(row, arguments)
    op, inputs = row.posed(*arguments)
    return row.result(row.empty(op.problem_of(inputs), inputs), inputs, arguments[0])


def _on_meta(row: TorchOp, arguments: Sequence[Any]) -> Made:
    """By stand-ins on the CPU: an op takes no tensors without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        made = shapes_of(row, [_moved(item, "cpu") for item in arguments])
    if isinstance(made, torch.Tensor):
        return _moved(made, "meta")
    return tuple(_moved(item, "meta") for item in made)


def _moved(item: Any, device: str) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=device)
