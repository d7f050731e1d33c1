"""A `Launch` (ops/base.py) that executes the AMD machine code of a kernel on tensors of the CPU."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd.arch import KERNELS_DIR, Arch, by_gfx
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import clang, codeobject
from tests import compiled
from tests.poison import poisoned
from tests.verify.amdgpu import executor, limits, loader
from tests.verify.amdgpu.memory import Memory
from tests.verify.amdgpu.sparse import LARGE_BYTES, runs, sparse, united
from tests.verify.simt.launch import Allocations

Shown = Callable[[torch.Tensor], Sequence[torch.Tensor]]


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


def built(
    spec: KernelSpec, arch: Arch, kernels_dir: Path = KERNELS_DIR, name: str = "clang"
) -> bytes:
    """The code object of a kernel. Raises CompileError."""
    if compiled.noting is not None:
        return compiled.noting.compile(spec, arch, kernels_dir)
    return _built(spec, arch, kernels_dir, name)


@cache
def _built(spec: KernelSpec, arch: Arch, kernels_dir: Path, name: str) -> bytes:
    found = compiler(name)
    assert found is not None
    return compiled.code(found, spec, arch, kernels_dir)


class _Sparse(Allocations):
    """Also: a large tensor without contents is sparse; of it `shown` gives what kernels may touch,
    and that is poisoned.
    """

    def __init__(self, shown: Shown) -> None:
        super().__init__()
        self.shown = shown

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "empty" in getattr(func, "__name__", ""):
            made = func(*args, **{**(kwargs or {}), "device": "meta"})
            if made.numel() * made.element_size() > LARGE_BYTES:
                made = sparse(made.shape, made.dtype, made.stride())
                for view in self.shown(made):
                    view.copy_(poisoned(torch.empty(view.shape, dtype=view.dtype)))
                    self.tensors.append(view)
                return made
        return super().__torch_function__(func, types, args, kwargs)


def _regions(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Address and size of what these tensors show: each storage whole, of a large one the runs of
    bytes that the tensors fill.
    """
    storages: dict[int, tuple[int, set[tuple[int, int]]]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        size, found = storages.setdefault(storage.data_ptr(), (storage.nbytes(), set()))
        found.update([(0, size)] if size <= LARGE_BYTES else runs(tensor))
    for address, (_, found) in storages.items():
        for start, size in united(found) if address else ():
            yield address + start, size


@dataclass
class CodeLaunch:
    """Executes kernels as `arch` would.

    Pointers among the parameters must lie in the storages of tensors given to `knows` or made while
    it is active; each storage becomes one buffer of exactly its size. Of a large one each run of
    bytes that a tensor fills becomes a buffer: of what was made, those of the views that `shown`
    gives of it. `groups`: which work-groups of a kernel's grid are executed, all where it gives
    None. `changed` may alter a code object first. `counts`: of every launch, in order. `last`: what
    was launched last. Raises
    ExecutionError.
    """

    arch: Arch
    seed: int = 1
    kernels_dir: Path = KERNELS_DIR
    changed: Callable[[bytes], bytes] | None = None
    compiled_by: str = "clang"
    schedule: int = 0
    last: KernelSpec | None = None
    counts: list[executor.Counts] = field(default_factory=list)
    groups: Callable[[str, int], Sequence[int] | None] = lambda entry, grid: None
    shown: Shown = lambda tensor: [tensor]
    _allocations: Allocations = field(init=False)

    def __post_init__(self) -> None:
        self._allocations = _Sparse(self.shown)

    @contextmanager
    def knows(self, *tensors: torch.Tensor | None) -> Iterator[None]:
        """Shows kernels the storages of these tensors, and of all made within the `with`."""
        if compiled.noting is not None:
            compiled.noting.begin()
        self._allocations.tensors = [tensor for tensor in tensors if tensor is not None]
        with self._allocations:
            yield
        if compiled.noting is not None:
            compiled.noting.end()

    def __call__(
        self,
        spec: KernelSpec,
        grid: int,
        block: int,
        params: ctypes.Structure,
        device: torch.device,
    ) -> None:
        how = (self.seed, self.schedule, self.groups(spec.entry, grid))
        regions = list(_regions(self._allocations.tensors))
        if compiled.noting is not None and self.changed is None:
            storages = [tensor.untyped_storage() for tensor in self._allocations.tensors]
            known = [*regions, *((each.data_ptr(), each.nbytes()) for each in storages)]
            compiled.noting.launch_code(self, spec, params, known, grid, block, *how)
            return
        code = built(spec, self.arch, self.kernels_dir, self.compiled_by)
        wrong = codeobject.refusals(code, spec.entry, self.arch)
        assert not wrong, wrong
        if self.changed is not None:
            code = self.changed(code)
        limits.check_wave(loader.load(code, spec.entry), self.arch)
        memory = Memory()
        for place, (address, size) in enumerate(regions):
            memory.add_host(address, size, f"tensor {place}")
        self.last = spec
        self.counts.append(executor.run(code, spec.entry, bytes(params), grid, block, memory, *how))
