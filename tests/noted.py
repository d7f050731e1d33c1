"""What a test of machine code would execute, noted without executing it: that is its key.

Code objects are known by a hash of what a GPU reads of them. Which one the sources give is in
tests/executed.json, too, so nothing need be compiled as long as these are the same.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lib_rocm_sd.arch import KERNELS_DIR, Arch
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime.compiler import LANGUAGE_OPTIONS, OPTIONS_VERSION, defines_options
from tests.amdgpu import executor, launch
from tests.compiled import hash_of, text_of
from tests.executed import Code, version_of

PROGRAM, NOTE, LOADED = 1, 7, 2
"""Types of ELF sections, and the flag of what is loaded."""


class Codes:
    """What sources give: what was known before, and what was `used` of it or found since."""

    def __init__(self, known: Iterable[Code]) -> None:
        self._known = {each.source: each.code for each in known}
        self.used: set[Code] = set()

    def taken(self) -> set[Code]:
        """What was used since this was asked last."""
        used, self.used = self.used, set()
        return used

    def of(
        self, spec: KernelSpec, arch: Arch, kernels_dir: Path = KERNELS_DIR, by: str = "clang"
    ) -> str:
        """The code object of a kernel; compiled only if the source is new."""
        compiler = f"{by} {version_of(by)}"
        options = defines_options({**arch.defines(), **dict(spec.defines)})
        how = (spec.entry, arch.gfx, OPTIONS_VERSION, *LANGUAGE_OPTIONS, *options, compiler)
        source = hash_of(text_of(kernels_dir / spec.source), *how)[:12]
        if source not in self._known:
            code = launch.built(spec, arch, kernels_dir, by)
            self._known[source] = hash_of(*_read(code))[:12]
        found = self._known[source]
        self.used.add(Code(compiler, f"{arch.gfx} {spec.entry}", source, found))
        return found


def _read(code: bytes) -> Iterator[bytes]:
    """What a GPU and its driver read of a code object: instructions, descriptor, metadata."""
    (at,) = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<HH", code, 58)
    for section in range(at, at + size * count, size):
        _, kind, flags, _, first, length = struct.unpack_from("<IIQQQQ", code, section)
        if kind == NOTE or (kind == PROGRAM and flags & LOADED):
            yield code[first : first + length]


def key_of(codes: Codes, name: object, test: Callable[[], object]) -> str:
    """Key of a test of this name: what `test`, run up to the end of its launches, would execute.
    Empty where that cannot be noted.
    """
    launches: list[Any] = []
    tensors: dict[int, int] = {}

    def shown(value: Any) -> Any:
        """Tensors are numbered as they come."""
        if isinstance(value, list):
            return [shown(each) for each in value]
        if isinstance(value, launch.Address):
            return tensors.setdefault(value.first, len(tensors)), value.size, value.place
        return value

    def note(made: launch.CodeLaunch, spec: KernelSpec, packed: Any, *how: Any) -> None:
        code = codes.of(spec, made.arch, made.kernels_dir, made.compiled_by)
        launches.append((code, spec.entry, shown(packed), *how))

    launch.noting = note
    try:
        test()
    except launch.Noted:
        return hash_of(name, executor.VERSION, *launches)[:12] if launches else ""
    except (Exception, pytest.skip.Exception):  # it does so again when it is executed
        return ""
    finally:
        launch.noting = None
    return ""
