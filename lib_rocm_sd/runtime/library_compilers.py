"""Compilers that are libraries: comgr, hiprtc and, for development on an NVIDIA card, NVRTC.

Each call is a worker process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib_rocm_sd import arch as arches
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.runtime import hangs, layouts, libraries, process
from lib_rocm_sd.runtime.compile_worker import CompilerJob
from lib_rocm_sd.runtime.compiler import (
    LANGUAGE_OPTIONS,
    Absent,
    Compiler,
    defines_options,
    file_identity,
    remembered,
)

_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from lib_rocm_sd.runtime.compile_worker import main; raise SystemExit(main(sys.argv[2]))"
)
_QUESTION_LIMIT_S = 20.0


@dataclass(frozen=True)
class LibraryCompiler(Compiler):
    """A compiler library at `path`; `name` is also the worker's word for its interface."""

    name: str
    path: Path

    def identity(self) -> str:
        return file_identity(self.name, self.path)

    def refusals(self, arch: Arch) -> list[str]:
        if arch.is_amd == (self.name == "nvrtc"):
            return [f"compiles for {'NVIDIA' if self.name == 'nvrtc' else 'AMD'} GPUs only"]
        if not sys.executable:
            return [
                "this process does not know its Python interpreter, which the compiler is run with"
            ]
        hung = hangs.refusal(self.identity(), process.time_limit_s())
        if hung:
            return [f"{self.path} {hung}"]
        facts = self.facts()
        if facts["trouble"]:
            return [facts["trouble"]]
        if facts["targets"] is not None and arch.gfx not in facts["targets"]:
            return [f"{self.name} {facts['version']} ({self.path}) has no target {arch.gfx}"]
        return []

    def facts(self) -> dict[str, Any]:
        """Version and targets (None where the library does not tell), or a `trouble`."""
        answer: dict[str, Any] | None = remembered(self.identity(), self._ask)
        return answer or {"trouble": f"{self.path} gave no answer"}

    def compile(
        self, source: str, entry: str, arch: Arch, defines: Mapping[str, int], file_name: str
    ) -> bytes:
        options = (*self._options(arch), *LANGUAGE_OPTIONS[: 1 if self.name == "nvrtc" else None])
        name = Path(file_name).name
        job = CompilerJob(
            self.name, str(self.path), arch.gfx, (*options, *defines_options(defines)), name, source
        )
        with process.work_folder() as folder:
            answer = self._work(job, folder, self.identity(), process.time_limit_s())
            if answer["trouble"]:
                raise CompileError(
                    self.name,
                    f"{file_name} for {arch.gfx}: {answer['trouble']}",
                    answer["log"],
                    source,
                )
            return (folder / "kernel.co").read_bytes()

    def disassemble(self, code: bytes, arch: Arch) -> str:
        """A code object as text (comgr only). Raises CompileError."""
        job = CompilerJob(self.name, str(self.path), arch.gfx, disassemble=True)
        with process.work_folder() as folder:
            (folder / "kernel.co").write_bytes(code)
            answer = self._work(job, folder, self.identity(), process.time_limit_s())
            if answer["trouble"]:
                raise CompileError(self.name, answer["trouble"], answer["log"], "")
            return (folder / "kernel.s").read_text(encoding="utf-8")

    def _options(self, arch: Arch) -> tuple[str, ...]:
        if self.name == "nvrtc":
            return (f"--gpu-architecture={arch.gfx}", "-default-device")  # for lambdas, CUDA 13.0
        if self.name == "hiprtc":
            return (f"--offload-arch={arch.gfx}", "-nogpuinc")
        return ("-nogpuinc", "-nogpulib", "-nostdinc")

    def _ask(self) -> dict[str, Any] | None:
        hung = hangs.refusal(self._question(), _QUESTION_LIMIT_S)
        if hung:
            return {"trouble": f"{self.path} {hung}"}
        try:
            with process.work_folder() as folder:
                job = CompilerJob(self.name, str(self.path))
                return self._work(job, folder, self._question(), _QUESTION_LIMIT_S)
        except OSError as error:
            return {"trouble": f"{self.path} was not asked: {error}"}

    def _question(self) -> str:
        return f"version of {self.identity()}"

    def _work(self, job: CompilerJob, folder: Path, what: str, limit_s: float) -> dict[str, Any]:
        """Run the worker on `job`; its answer, or one that says how the process ended.

        A hang is noted of `what`.
        """
        job.save(folder / "job.json")
        root = str(arches.PACKAGE.parent)
        result = process.run(
            [sys.executable, "-I", "-S", "-c", _START, root, folder], limit_s, cwd=folder
        )
        if result.hung:
            hangs.note(what, limit_s)
        try:
            answer: dict[str, Any] = json.loads(
                (folder / "result.json").read_text(encoding="utf-8")
            )
        except (OSError, ValueError):
            return {
                "trouble": f"{job.library}: {result.trouble or 'gave no answer'}",
                "log": result.output,
            }
        if result.output.strip():
            answer["log"] = f"{answer.get('log', '')}\n{result.output}".strip()
        return answer


def comgrs() -> list[Compiler]:
    """Each libamd_comgr found."""
    return _found("comgr", libraries.rocm_library_folders(), layouts.COMGR)


def hiprtcs() -> list[Compiler]:
    """Each libhiprtc found."""
    return _found("hiprtc", libraries.rocm_library_folders(), layouts.HIPRTC)


def nvrtcs() -> list[Compiler]:
    """Each NVRTC found; none unless ROCM_SD_ALLOW_CUDA=1."""
    if os.environ.get("ROCM_SD_ALLOW_CUDA") != "1":
        return [Absent("nvrtc", ["for development only: ROCM_SD_ALLOW_CUDA=1 is not set"])]
    return _found("nvrtc", libraries.cuda_library_folders(), layouts.NVRTC)


def _found(name: str, folders: list[Path], library: layouts.Library) -> list[Compiler]:
    paths, reasons = libraries.find(folders, library)
    if paths:
        return [LibraryCompiler(name, path) for path in paths]
    looked = ", ".join(str(folder) for folder in folders) or "any known folder"
    return [Absent(name, [*reasons, f"no {library.described()} in {looked}"])]
