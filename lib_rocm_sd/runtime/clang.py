"""clang as a program: a ROCm SDK's, the system's, and the one inside PyPI's package ziglang.

It compiles, assembles and links in three steps, because neither ziglang's nor a distribution's
driver finds a linker for AMD code.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.runtime import hangs, libraries, process
from lib_rocm_sd.runtime.compiler import (
    LANGUAGE_OPTIONS,
    Absent,
    Compiler,
    defines_options,
    file_identity,
    remembered,
)

OLDEST = 17
_NEWEST = 24
_TARGET = "--target=amdgcn-amd-amdhsa"
# Code object version 4: every ROCm from 5 on loads it; a newer clang's default may be too new.
_DEVICE_OPTIONS = (
    "--offload-device-only",
    "--no-gpu-bundle-output",
    "-nogpulib",
    "-nogpuinc",
    "-nostdinc",
    "-mcode-object-version=4",
)
_VERSION = re.compile(r"clang version (\d+)\.(\d+)\.(\d+)")
_QUESTION_LIMIT_S = 10.0


@dataclass(frozen=True)
class Clang(Compiler):
    """One clang and the linker that goes with it.

    `program` and `linker` are command lines, `path` the clang's file.
    """

    name: str
    program: tuple[str, ...]
    linker: tuple[str, ...]
    path: Path

    def identity(self) -> str:
        return file_identity(self.name, self.path)

    def refusals(self, arch: Arch) -> list[str]:
        if not arch.is_amd:
            return ["compiles for AMD GPUs only"]
        hung = hangs.refusal(self.identity(), process.time_limit_s())
        if hung:
            return [f"{self.path} {hung}"]
        facts = remembered(self.identity(), self._ask) or {"trouble": "does not run"}
        if facts["trouble"]:
            return [f"{self.path} {facts['trouble']}"]
        title = f"clang {facts['version']} ({self.path})"
        if int(facts["version"].split(".")[0]) < OLDEST:
            return [f"{title} is older than {OLDEST}"]
        if arch.gfx not in facts["targets"]:
            return [f"{title} has no target {arch.gfx}: a newer LLVM is needed"]
        return [] if self.linker else [f"{title} has no ld.lld beside it or in PATH (package lld)"]

    def llvm_version(self) -> str:
        facts = remembered(self.identity(), self._ask) or {"trouble": "does not run"}
        return "" if facts["trouble"] or facts.get("amd") else str(facts["version"])

    def compile(
        self, source: str, entry: str, arch: Arch, defines: Mapping[str, int], file_name: str
    ) -> bytes:
        return self._made("kernel.co", self._steps(arch, defines), arch, source, file_name)

    def assembly(self, source: str, arch: Arch, defines: Mapping[str, int], file_name: str) -> str:
        """What `compile` makes of `source` on the way, before it is assembled. Raises
        CompileError.
        """
        steps = self._steps(arch, defines)[:1]
        return self._made("kernel.s", steps, arch, source, file_name).decode("utf-8")

    def _made(
        self, name: str, steps: Sequence[list[str]], arch: Arch, source: str, file_name: str
    ) -> bytes:
        """The file of this name, which the steps write. Raises CompileError."""
        limit_s = process.time_limit_s()
        deadline = time.monotonic() + limit_s
        with process.work_folder() as work:
            (work / "kernel.hip").write_text(source, encoding="utf-8")
            for step in steps:
                result = process.run(step, max(deadline - time.monotonic(), 0.001), cwd=work)
                if result.hung:
                    hangs.note(self.identity(), limit_s)
                if result.trouble:
                    message = f"{file_name} for {arch.gfx}: {result.trouble}"
                    raise CompileError(self.name, message, result.output, source)
            return (work / name).read_bytes()

    def _steps(self, arch: Arch, defines: Mapping[str, int]) -> list[list[str]]:
        """To assembly, to an object, linked: the same three steps whether or not the driver can
        find a linker itself.
        """
        hip = ["-x", "hip", f"--offload-arch={arch.gfx}", *_DEVICE_OPTIONS, *LANGUAGE_OPTIONS]
        assemble = [_TARGET, f"-mcpu={arch.gfx}", "-mcode-object-version=4", "-c"]
        return [
            [*self.program, *hip, *defines_options(defines), "-S", "kernel.hip", "-o", "kernel.s"],
            [*self.program, *assemble, "kernel.s", "-o", "kernel.o"],
            [*self.linker, "-shared", "kernel.o", "-o", "kernel.co"],
        ]

    def _question(self) -> str:
        return f"version of {self.identity()}"

    def _ask(self) -> dict[str, Any]:
        hung = hangs.refusal(self._question(), _QUESTION_LIMIT_S)
        if hung:
            return {"trouble": hung, "version": "", "targets": []}
        result = process.run(
            [*self.program, _TARGET, "-nogpulib", "--print-supported-cpus"], _QUESTION_LIMIT_S
        )
        if result.hung:
            hangs.note(self._question(), _QUESTION_LIMIT_S)
        version = _VERSION.search(result.output)
        if result.trouble or version is None:
            return {"trouble": result.trouble or "is not a clang", "version": "", "targets": []}
        targets = re.findall(r"^\s+(gfx\w+)\s*$", result.output, re.MULTILINE)
        return {
            "trouble": "" if targets else "was built without the AMDGPU target",
            "version": ".".join(version.groups()),
            "amd": "AMD clang" in result.output,
            "targets": targets,
        }


def sdk_clangs() -> list[Compiler]:
    """The clang of each ROCm SDK found."""
    folders = [Path(os.environ["HIP_CLANG_PATH"])] if os.environ.get("HIP_CLANG_PATH") else []
    for program in ("amdclang++", "hipcc"):
        where = shutil.which(program)
        if where:
            folder = Path(where).resolve().parent
            folders += [
                folder,
                folder.parent / "llvm" / "bin",
                folder.parent / "lib" / "llvm" / "bin",
            ]
    for root in libraries.rocm_roots():
        folders += [root / "llvm" / "bin", root / "lib" / "llvm" / "bin", root / "bin"]
    clangs: dict[Path, Compiler] = {}
    for folder in folders:
        path = _first_file(folder / f"{name}{_EXE}" for name in ("amdclang++", "clang++"))
        # Beside a distribution's hipcc, in /usr/bin, is its own clang: see path_clangs.
        if path is not None and (
            path.name.startswith("amdclang") or path.parent in _linker_folders(path)
        ):
            clangs.setdefault(
                path.resolve(), Clang("amdclang++", (str(path),), _linker_beside(path), path)
            )
    return list(clangs.values()) or [Absent("amdclang++", ["no ROCm SDK with a clang was found"])]


def path_clangs() -> list[Compiler]:
    """The clangs in PATH, the unversioned one first, then the newest."""
    names = ["clang", *(f"clang-{version}" for version in range(_NEWEST, OLDEST - 1, -1))]
    clangs: dict[Path, Compiler] = {}
    for name in names:
        where = shutil.which(name)
        if where:
            path = Path(where)
            clangs.setdefault(
                path.resolve(), Clang("clang", (where,), _linker_for(path, name), path)
            )
    return list(clangs.values()) or [Absent("clang", [f"no clang {OLDEST} or newer in PATH"])]


def zig_clangs() -> list[Compiler]:
    """The clang and the linker inside PyPI's package ziglang."""
    package = importlib.util.find_spec("ziglang")
    if package is None or not package.origin:
        return [Absent("ziglang", ["the Python package ziglang is not installed"])]
    path = Path(package.origin).parent / f"zig{_EXE}"
    if not path.is_file():
        return [Absent("ziglang", [f"{path} does not exist"])]
    return [Clang("ziglang", (str(path), "clang"), (str(path), "ld.lld"), path)]


_EXE = ".exe" if sys.platform == "win32" else ""


def _first_file(paths: Iterable[Path]) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


def _linker_folders(clang: Path) -> Sequence[Path]:
    """The folders near a clang that hold an ld.lld."""
    return [
        folder
        for folder in (clang.parent, clang.resolve().parent)
        if (folder / f"ld.lld{_EXE}").is_file()
    ]


def _linker_beside(clang: Path) -> tuple[str, ...]:
    return tuple(str(folder / f"ld.lld{_EXE}") for folder in _linker_folders(clang)[:1])


def _linker_for(clang: Path, name: str) -> tuple[str, ...]:
    beside = _linker_beside(clang)
    if beside:
        return beside
    version = re.search(r"-(\d+)$", name) or re.search(r"llvm-(\d+)", str(clang.resolve()))
    own = [f"ld.lld-{version.group(1)}"] if version else []
    others = [f"ld.lld-{number}" for number in range(_NEWEST, OLDEST - 1, -1)]
    where = next((path for path in map(shutil.which, [*own, "ld.lld", *others]) if path), None)
    return (where,) if where else ()
