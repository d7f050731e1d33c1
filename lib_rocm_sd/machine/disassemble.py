"""A kernel's machine code as text: by llvm-objdump, by libamd_comgr, or, where neither knows the
chip, as the assembly of the clang that made it.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.machine.listing import Function, ListingError, from_assembly, from_disassembly
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import build, compilers, process, source
from lib_rocm_sd.runtime.clang import OLDEST, Clang
from lib_rocm_sd.runtime.library_compilers import LibraryCompiler

_EXE = ".exe" if sys.platform == "win32" else ""
_NEWEST = 24
_LIMIT_S = 120.0
_MOST_TEXT_BYTES = 1 << 28


class NoListingError(Exception):
    """Nothing here makes text of this code object; `reasons` says what was tried."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


@dataclass(frozen=True)
class Listing:
    """The functions of a code object, and what read them out of it: the kind of tool."""

    functions: tuple[Function, ...]
    made_by: str

    def function(self, name: str) -> Function:
        """Raises ListingError where there is none of this name."""
        for function in self.functions:
            if function.name == name:
                return function
        raise ListingError(f"no function {name} in what {self.made_by} says")


_Way = tuple[str, Path, Callable[[], list[Function]]]
_refused: dict[tuple[str, str], str] = {}


def listing(spec: KernelSpec, arch: Arch, made: build.CodeObject) -> Listing:
    """`made` as text, by the first way that can. What failed for a chip once is not tried again in
    this process. Raises NoListingError.
    """
    reasons: list[str] = []
    for name, path, read in _ways(spec, arch, made):
        key = (f"{name} {path}", arch.gfx)
        if key not in _refused:
            try:
                return Listing(tuple(read()), name)
            except (ListingError, CompileError) as error:
                _refused[key] = f"{name} ({path}): {error}"
        reasons.append(_refused[key])
    raise NoListingError(reasons or ["no llvm-objdump, no libamd_comgr and no clang was found"])


def _ways(spec: KernelSpec, arch: Arch, made: build.CodeObject) -> Iterator[_Way]:
    every = list(compilers.in_order(arch))
    clangs = [compiler for compiler in every if isinstance(compiler, Clang)]
    for path in _objdumps(clangs):
        yield "llvm-objdump", path, partial(_by_objdump, path, made.code)
    for compiler in every:
        if isinstance(compiler, LibraryCompiler) and compiler.name == "comgr":
            yield "comgr", compiler.path, partial(_by_comgr, compiler, arch, made.code)
    own = (each for each in clangs if each.name == made.compiler and not each.refusals(arch))
    for clang in islice(own, 1):  # another version's assembly is other code
        yield f"assembly of {clang.name}", clang.path, partial(_by_compiler, clang, spec, arch)


def _objdumps(clangs: list[Clang]) -> list[Path]:
    """Each llvm-objdump: those beside a clang first, then in PATH, the newest first."""
    found = [
        folder / f"llvm-objdump{_EXE}"
        for clang in clangs
        for folder in (clang.path.parent, clang.path.resolve().parent)
    ]
    names = [f"llvm-objdump-{version}" for version in range(_NEWEST, OLDEST - 1, -1)]
    found += [Path(path) for path in map(shutil.which, [*names, "llvm-objdump"]) if path]
    return list({path.resolve(): path for path in reversed(found) if path.is_file()}.values())[::-1]


def _by_objdump(path: Path, code: bytes) -> list[Function]:
    with process.work_folder() as folder:
        file = folder / "kernel.co"
        file.write_bytes(code)
        done = process.run([path, "-d", file], _LIMIT_S, output_limit_bytes=_MOST_TEXT_BYTES)
    if done.trouble:
        said = re.search(r"(?:LLVM ERROR|error): .*", done.output)
        raise ListingError(f"{done.trouble}: {said[0] if said else done.output[:200]}")
    return from_disassembly(done.output)


def _by_comgr(comgr: LibraryCompiler, arch: Arch, code: bytes) -> list[Function]:
    return from_disassembly(comgr.disassemble(code, arch))


def _by_compiler(clang: Clang, spec: KernelSpec, arch: Arch) -> list[Function]:
    defines = {**arch.defines(), **dict(spec.defines)}
    text = source.flatten(spec.source)
    return from_assembly(clang.assembly(text, arch, defines, spec.source))
