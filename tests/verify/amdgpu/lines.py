"""Which line of source each instruction of a kernel comes from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from lib_rocm_sd.arch import KERNELS_DIR, Arch
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import source
from tests.verify.amdgpu import loader
from tests.verify.amdgpu.launch import built, compiler

_FILE = re.compile(r'\s*\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]+)"')
_PLACE = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)")
_INSTRUCTION = re.compile(r"\t((?:s|v|ds|global|flat|buffer|scratch)_\w+)")


@cache
def lines_of(
    spec: KernelSpec, arch: Arch, kernels_dir: Path = KERNELS_DIR, name: str = "clang"
) -> dict[int, tuple[str, int]]:
    """File and line of the instruction at each address, by the assembly that clang writes on the
    way with -gline-tables-only. Empty where that is other code. Line 0: the compiler's own.
    """
    clang = compiler(name)
    assert clang is not None
    telling = replace(clang, program=(*clang.program, "-gline-tables-only"))
    text = source.flatten(str(kernels_dir / spec.source))
    defines = {**arch.defines(), **dict(spec.defines)}
    written = list(_written(telling.assembly(text, arch, defines, spec.source)))
    found = {}
    for each in loader.load(built(spec, arch, kernels_dir, name), spec.entry).instructions:
        if each.name == "S_NOP" and (not written or written[0][0] != "s_nop"):
            continue  # before a loop that begins at a multiple of so many bytes
        if not written:
            return {}
        _, found[each.address] = written.pop(0)
    return {} if written else found


def _written(assembly: str) -> Iterator[tuple[str, tuple[str, int]]]:
    """Name and place of each instruction of the first section that has any."""
    files: dict[str, str] = {}
    here, some = ("", 0), False
    for text in assembly.splitlines():
        if text.startswith("\t.section") and some:
            return
        if named := _FILE.match(text):
            files[named[1]] = Path(named[2]).name
        elif placed := _PLACE.match(text):
            here = (files[placed[1]], int(placed[2]))
        elif found := _INSTRUCTION.match(text):
            some = True
            yield found[1], here


def text_at(file: str, line: int) -> str:
    """The line of one of kernels/, without the space around it."""
    path = next((each for each in KERNELS_DIR.rglob("*") if each.name == file), None)
    if path is None or not line:
        return ""
    return path.read_text(encoding="utf-8").splitlines()[line - 1].strip()
