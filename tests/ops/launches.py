"""A launcher that launches nothing and notes what it was given, and tensors for it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lib_rocm_sd.errors import LaunchError
from lib_rocm_sd.ops.base import KernelSpec


@dataclass
class Launches:
    """Notes what each launch is given. `pause`: between being called and reading."""

    pause: Callable[[], object] = bool
    seen: list[tuple[Any, ...]] = field(default_factory=list)
    prepared: int = 0
    fails: bool = False

    def __call__(
        self, spec: KernelSpec, grid: int, block: int, params: ctypes.Structure, device: Any
    ) -> None:
        self.pause()
        if self.fails:
            raise LaunchError("no")
        self.seen.append((spec, grid, block, bytes(params), device))

    def prepare(
        self, spec: KernelSpec, grid: int, block: int, params: ctypes.Structure, device: Any
    ) -> Callable[[], None]:
        self.prepared += 1
        return lambda: self(spec, grid, block, params, device)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same strides, no longer at a multiple of 16 bytes."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
