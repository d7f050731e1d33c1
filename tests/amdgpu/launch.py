"""A `Launch` (ops/base.py) that executes the AMD machine code of a kernel on tensors of the CPU."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd.arch import KERNELS_DIR, Arch, by_gfx
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import clang, codeobject
from tests import compiled
from tests.amdgpu import executor
from tests.amdgpu.memory import Memory
from tests.simt.launch import Allocations


@cache
def compiler(name: str = "clang") -> clang.Clang | None:
    """The newest clang in PATH, or the one inside ziglang; None where none has a linker."""
    every = clang.zig_clangs() if name == "ziglang" else clang.path_clangs()
    found = [each for each in every if isinstance(each, clang.Clang)]
    return next((each for each in found if each.linker), None)


def missing(gfx: str = "gfx1100", name: str = "clang") -> str | None:
    """Why nothing can be compiled for `gfx` here."""
    found, arch = compiler(name), by_gfx(gfx)
    assert arch is not None
    if importlib.util.find_spec("tinygrad") is None:
        return "tinygrad, which decodes instructions, is not installed"
    if found is None:
        return f"no {name} with ld.lld"
    return "; ".join(found.refusals(arch)) or None


@cache
def built(
    spec: KernelSpec, arch: Arch, kernels_dir: Path = KERNELS_DIR, name: str = "clang"
) -> bytes:
    """The code object of a kernel. Raises CompileError."""
    found = compiler(name)
    assert found is not None
    return compiled.code(found, spec, arch, kernels_dir)


@dataclass
class CodeLaunch:
    """Executes kernels as `arch` would.

    Pointers among the parameters must lie in the storages of tensors given to `knows` or made while
    it is active; each storage becomes one buffer of exactly its size. `changed` may alter a code
    object first. `counts`: of every launch, in order. Raises ExecutionError.
    """

    arch: Arch
    seed: int = 1
    kernels_dir: Path = KERNELS_DIR
    changed: Callable[[bytes], bytes] | None = None
    compiled_by: str = "clang"
    counts: list[executor.Counts] = field(default_factory=list)
    _allocations: Allocations = field(default_factory=Allocations)

    def knows(self, *tensors: torch.Tensor | None) -> AbstractContextManager[Any]:
        """Shows kernels the storages of these tensors, and of all made within the `with`."""
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
        code = built(spec, self.arch, self.kernels_dir, self.compiled_by)
        wrong = codeobject.refusals(code, spec.entry, self.arch)
        assert not wrong, wrong
        if self.changed is not None:
            code = self.changed(code)
        memory = Memory()
        storages = [tensor.untyped_storage() for tensor in self._allocations.tensors]
        regions = {each.data_ptr(): each.nbytes() for each in storages if each.data_ptr()}
        for place, (address, size) in enumerate(regions.items()):
            memory.add_host(address, size, f"tensor {place}")
        self.counts.append(
            executor.run(code, spec.entry, bytes(params), grid, block, memory, self.seed)
        )
