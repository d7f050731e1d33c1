"""CUDA's autocast, by which the WebUI runs a UNet on a GPU, on the CPU.

The CPU's own casts the same operations to half precision, but leaves some to their inputs' dtype
that CUDA's computes in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

IN_FLOAT32 = frozenset(
    {F.group_norm, F.layer_norm, F.softmax, torch.softmax, torch.Tensor.softmax, torch.Tensor.norm}
)
"""https://docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32"."""


@contextmanager
def as_on_a_gpu(dtype: torch.dtype, enabled: bool = True) -> Iterator[None]:
    """In force where the CPU's autocast is, so that code which switches that off has neither."""
    if not enabled:
        yield
        return
    with torch.autocast("cpu", dtype=dtype), _InFloat32():
        yield


class _InFloat32(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func in IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args = tuple(map(_widened, args))
            given = {key: _widened(value) for key, value in given.items()}
        return func(*args, **given)


def _widened(value: Any) -> Any:
    half = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.float() if half and value.dtype.itemsize == 2 else value
