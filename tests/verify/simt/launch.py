"""A `Launch` (ops/base.py) that runs kernels under the shim, on torch tensors of the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from lib_rocm_sd.arch import KERNELS_DIR, Arch
from lib_rocm_sd.ops.base import KernelSpec
from tests import compiled
from tests.poison import poisoned
from tests.verify.simt import Region, compile_shim, missing, run


class Allocations(TorchFunctionMode):
    """Keeps every tensor that a function of torch returns; memory without contents is poisoned."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            if "empty" in getattr(func, "__name__", ""):
                poisoned(result)
            self.tensors.append(result)
        return result


class ShimLaunch:
    """Runs kernels as `arch` would.

    Pointers among the parameters must lie in the storages of tensors given to `knows` or made while
    it is active; each storage becomes one allocation of exactly its size. Raises SimtError, and
    skips the test where no clang here has the sanitizer.
    """

    def __init__(
        self,
        arch: Arch,
        seed: int = 1,
        sanitize: str | None = None,
        kernels_dir: Path = KERNELS_DIR,
    ) -> None:
        if sanitize is not None and (reason := missing(sanitize)):
            pytest.skip(reason)
        self.arch = arch
        self.seed = seed
        self.sanitize = sanitize
        self.kernels_dir = kernels_dir
        self.timeout_s = 600.0
        self._allocations = Allocations()

    def knows(self, *tensors: torch.Tensor | None) -> AbstractContextManager[Any]:
        """Shows kernels the storages of these tensors, and of all made within the `with`."""
        if compiled.noting is not None:
            compiled.noting.begin()
        self._allocations.tensors = [tensor for tensor in tensors if tensor is not None]
        return self._allocations

    def __call__(
        self,
        spec: KernelSpec,
        grid: int,
        block: int,
        params: ctypes.Structure,
        device: torch.device,
    ) -> None:
        storages = [tensor.untyped_storage() for tensor in self._allocations.tensors]
        regions = {storage.data_ptr(): storage.nbytes() for storage in storages}
        program = compile_shim(spec, self.arch, self.sanitize, self.kernels_dir)
        memory = [Region(address, nbytes) for address, nbytes in regions.items() if address]
        run(program, params, memory, grid, block, self.seed, self.timeout_s)
