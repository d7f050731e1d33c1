"""Which line of source each instruction of a kernel comes from."""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from lib_rocm_sd.arch import KERNELS_DIR, Arch
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import source
from tests.amdgpu.launch import compiler

_FILE = re.compile(r'\s*\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]+)"')
_PLACE = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)")
_INSTRUCTION = re.compile(r"\t(s|v|ds|global|flat|buffer|scratch)_\w+")


@cache
def lines_of(spec: KernelSpec, arch: Arch) -> tuple[tuple[str, int], ...]:
    """File and line of each instruction, in their order, by the assembly that clang writes on the
    way with -gline-tables-only. Line 0: the compiler's own.
    """
    clang = compiler()
    assert clang is not None
    defines = {**arch.defines(), **dict(spec.defines)}
    command, *_ = clang._steps(arch, defines)
    with tempfile.TemporaryDirectory() as folder:
        text = source.flatten(str(KERNELS_DIR / spec.source))
        Path(folder, "kernel.hip").write_text(text, encoding="utf-8")
        subprocess.run([*command, "-gline-tables-only"], cwd=folder, check=True)
        return _places(Path(folder, "kernel.s").read_text(encoding="utf-8"))


def _places(assembly: str) -> tuple[tuple[str, int], ...]:
    files: dict[str, str] = {}
    here = ("", 0)
    found = []
    for text in assembly.splitlines():
        if text.startswith("\t.section") and found:
            break
        if named := _FILE.match(text):
            files[named[1]] = Path(named[2]).name
        elif placed := _PLACE.match(text):
            here = (files[placed[1]], int(placed[2]))
        elif _INSTRUCTION.match(text):
            found.append(here)
    return tuple(found)


def text_at(file: str, line: int) -> str:
    """The line of one of kernels/, without the space around it."""
    path = next((each for each in KERNELS_DIR.rglob("*") if each.name == file), None)
    if path is None or not line:
        return ""
    return path.read_text(encoding="utf-8").splitlines()[line - 1].strip()
