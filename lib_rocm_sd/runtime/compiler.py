"""What a compiler is to the rest: a name, reasons why it cannot serve, an identity that is cheap to
take, and `compile`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib_rocm_sd import cache
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.runtime import hangs

LANGUAGE_OPTIONS = ("-std=c++17", "-O3")
OPTIONS_VERSION = "options 1"
"""Part of every cache key: raise it when any compiler is called with other options than before."""


class Compiler(ABC):
    """One way to turn a flattened source into a code object.

    Nothing is looked for or started before it is asked for.
    """

    name: str

    @abstractmethod
    def refusals(self, arch: Arch) -> list[str]:
        """Why it cannot compile for `arch` on this machine; empty when it can.

        May start the compiler, for its version.
        """

    @abstractmethod
    def identity(self) -> str:
        """Changes when the compiler's files change; empty when it was not found. Starts nothing."""

    def llvm_version(self) -> str:
        """Version of the LLVM release that this compiler is, such as 19.1.7; empty where it is
        none, like AMD's builds, or does not tell. May start the compiler.
        """
        return ""

    @abstractmethod
    def compile(
        self, source: str, entry: str, arch: Arch, defines: Mapping[str, int], file_name: str
    ) -> bytes:
        """The code object of `source` for `arch`.

        Raises CompileError, also for a crash or a run past the time limit.
        """


def defines_options(defines: Mapping[str, int]) -> list[str]:
    """`-DNAME=value` for each, sorted by name."""
    return [f"-D{name}={value}" for name, value in sorted(defines.items())]


def real_path(path: Path) -> Path:
    """`path` without links; as it is where the file system does not tell, as Windows' RAM disks."""
    try:
        return path.resolve()
    except OSError:
        return path.absolute()


def file_identity(name: str, path: Path) -> str:
    """A compiler's identity by the file that holds it: name, real path, size and time of change;
    empty when it is gone.
    """
    real = real_path(path)
    try:
        status = real.stat()
    except OSError:
        return ""
    return json.dumps([name, str(real), status.st_size, status.st_mtime_ns])


def still_the_same(identity: str) -> bool:
    """False when the compiler of this identity is still there but has changed since; a compiler
    that is gone leaves its work valid.
    """
    try:
        name, path, *_ = json.loads(identity)
        now = file_identity(name, Path(path))
    except (ValueError, TypeError):
        return False
    return now in ("", identity)


_remembered: dict[str, Any] = {}


def remembered(identity: str, ask: Callable[[], Any]) -> Any:
    """What `ask` once found out about the compiler of this identity (JSON-able), kept in the cache
    folder.

    A question that failed (None, or an answer with a `trouble`) is asked again by the next process,
    and after `forget_failures`.
    """
    if identity in _remembered:
        return _remembered[identity]
    key = cache.key_of("compiler facts 1", identity)
    stored = cache.read("compilers", key)
    answer = ask() if stored is None else json.loads(stored)
    if stored is None and not _failed(answer):
        cache.write("compilers", key, json.dumps(answer).encode())
    _remembered[identity] = answer
    return answer


def _failed(answer: Any) -> bool:
    return answer is None or (isinstance(answer, dict) and bool(answer.get("trouble")))


def forget_failures() -> None:
    """Let compilers that hung or gave no answer be asked again."""
    hangs.forget()
    for identity in [each for each, answer in _remembered.items() if _failed(answer)]:
        del _remembered[identity]


@dataclass(frozen=True)
class Absent(Compiler):
    """Stands where a compiler was looked for and not found."""

    name: str
    reasons: list[str]

    def refusals(self, arch: Arch) -> list[str]:
        return list(self.reasons)

    def identity(self) -> str:
        return ""

    def compile(
        self, source: str, entry: str, arch: Arch, defines: Mapping[str, int], file_name: str
    ) -> bytes:
        raise CompileError(self.name, "; ".join(self.reasons), "", source)
