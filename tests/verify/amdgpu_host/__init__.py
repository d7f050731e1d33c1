"""A GPU of AMD's that is this process: HIP's C interface (tests/verify/hip_library) on the
executor of AMD machine code (tests/verify/amdgpu).

Everything of the project runs unchanged above it: engine, clang, cache, loader, ctypes, packed
arguments, streams. Only what torch and the launcher's lookup say of the device is changed: tensors
of the CPU count as that GPU's. Compilers other than the clang in PATH are left aside.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.verify import hip_library
from tests.verify.amdgpu import executor
from tests.verify.amdgpu.memory import Memory

if TYPE_CHECKING:
    from lib_rocm_sd.trials.subject import Subject

NAMES = {
    "gfx1100": "AMD Radeon RX 7900 XTX",
    "gfx1151": "AMD Radeon 8060S Graphics",
    "gfx1201": "AMD Radeon RX 9070 XT",
    "gfx942": "AMD Instinct MI300X",
    "gfx90a": "AMD Instinct MI210",
}
FAILED = 719
"""hipErrorLaunchFailure: what a launch returns whose execution was stopped."""
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))


@dataclass(frozen=True)
class Done:
    """One launch that was executed to its end."""

    entry: str
    grid: int
    block: int
    stream: int
    counts: executor.Counts


@dataclass
class Gpu:
    """What was launched, and what the executor refused: `errors` fail the test in the end."""

    gfx: str
    library: Any
    stream: int
    launches: list[Done] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def entries(self) -> Counter[str]:
        """Launches by the kernel's name."""
        return Counter(each.entry for each in self.launches)

    def execute(
        self,
        image: int,
        size: int,
        entry: bytes,
        grid: int,
        block: int,
        arguments: int,
        count: int,
        stream: int,
    ) -> int:
        """What hip.c calls for a launch. Kernels may touch the storages of all tensors that live
        now, and nothing else.
        """
        try:
            code, given = ctypes.string_at(image, size), ctypes.string_at(arguments, count)
            counts = executor.run(code, entry.decode(), given, grid, block, memory())
        except BaseException as error:  # ctypes would print it and go on
            self.errors.append(error)
            return FAILED
        self.launches.append(Done(entry.decode(), grid, block, stream, counts))
        return 0


@contextmanager
def standing_in(gfx: str, folder: Path) -> Iterator[Gpu]:
    """The CPU is a `gfx` for as long as this lasts. `folder` is for the library.

    It is so for the lib_rocm_sd that is imported when this begins. Raises the first error of the
    executor, and AssertionError where the library complained.
    """
    ours = Modules()
    library = hip_library.opened(_library(folder))
    library.test_set_machine(hip_library.MACHINES[gfx])
    gpu = Gpu(gfx, library, int(library.test_stream()))
    kept = hip_library.set_executor(library, gpu.execute)
    name = f"{gfx}:sramecc+:xnack-"
    with pytest.MonkeyPatch.context() as patch:
        as_gpu(patch, ours.device.Facts("cuda", 0, NAMES[gfx], "6.4", name), gpu.stream, ours)
        try:
            yield gpu
        finally:
            hip_library.set_executor(library, None)
            library.test_set_machine(0)
            del kept
            ours.forget()
            executor.forget()
    if gpu.errors:
        raise gpu.errors[0]
    assert hip_library.complaints(library) == []


def smallest(cases: Sequence[Subject]) -> list[Subject]:
    """Take from a self-test's cases each op's smallest, and its smallest over a shortcut."""
    found: dict[tuple[str, bool], Subject] = {}
    for case in sorted(cases, key=_size):
        found.setdefault((case.op.name, getattr(case.problem, "in_place", False)), case)
    return list(found.values())


def _size(case: Subject) -> int:
    return torch.Size(case.op.output_shape(case.problem)).numel()


_built: list[Path] = []


def _library(folder: Path) -> Path:
    """One per process: the HIP runtime is the library of that name which the process has loaded."""
    if not _built:
        _built.append(hip_library.built(folder))
    return _built[0]


class Modules:
    """What is changed of lib_rocm_sd, or has to forget what it knew of the device."""

    def __init__(self) -> None:
        names = (
            "device",
            "engine.engine",
            "runtime.launcher",
            "runtime.clang",
            "runtime.compilers",
        )
        made = [importlib.import_module(f"lib_rocm_sd.{name}") for name in names]
        self.device, self.engine, self.launcher, self.clang, self.compilers = map(_untyped, made)

    def forget(self) -> None:
        self.device.forget()
        self.launcher.reset()
        self.engine.engine.reset()


def _untyped(module: Any) -> Any:
    return module


def as_gpu(patch: pytest.MonkeyPatch, facts: Any, stream: int, ours: Modules) -> None:
    """What torch and Linux would say: one AMD GPU, device 0, on which `stream` is current."""
    patch.setattr(ours.device, "_facts", lambda kind, index: facts)
    patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream, raising=False)
    patch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    found = ours.launcher.launcher_for
    patch.setattr(
        ours.launcher, "launcher_for", lambda where, row: found(torch.device("cuda", 0), row)
    )
    patch.setattr(ours.compilers, "all_compilers", ours.clang.path_clangs)
    ours.forget()


_former: list[weakref.ref[torch.Tensor]] = []
"""The tensors that were there at the last launch."""


def _tensors() -> Iterator[torch.Tensor]:
    """All that are referred to. An executor's launch leaves a hundred thousand objects, so each
    launch looks only at those that came since the last.
    """
    objects = gc.get_objects()
    new = compress(objects, map(_TENSORS.__contains__, map(type, objects)))
    former = (tensor for tensor in (each() for each in _former) if tensor is not None)
    tensors = [*former, *new]
    _former[:] = map(weakref.ref, tensors)
    gc.freeze()
    return iter(tensors)


def memory() -> Memory:
    """The storages of all tensors, as buffers of exactly their sizes; nested ones are one.

    Not of those that are older than the test's file (`_settled` in tests/conftest.py).
    """
    found: dict[int, int] = {}
    for each in _tensors():
        if each.device.type == "cpu" and each.layout == torch.strided:
            storage = each.untyped_storage()
            if storage.data_ptr():
                at = storage.data_ptr()
                found[at] = max(found.get(at, 0), storage.nbytes())
    memory, end = Memory(), 0
    for at in sorted(found):
        if at >= end:
            memory.add_host(at, found[at], f"storage of {found[at]} bytes")
            end = at + found[at]
        elif at + found[at] > end:
            raise ValueError(f"two storages overlap at {at:#x}")
    return memory
