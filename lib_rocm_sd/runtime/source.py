"""One self-contained string out of a kernel file and the headers that it includes."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from lib_rocm_sd import arch

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
_PRAGMA_ONCE = re.compile(r"^\s*#\s*pragma\s+once\b")
_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
# Present in the tests only, included under `#if defined(SIMT_SHIM)`: stays as it is.
_SHIM_HEADER = "simt.h"


def flatten(source: str) -> str:
    """The file `source` of kernels/ with every `#include "..."` replaced by the header's text, each
    header once.

    `#line` directives keep the compilers' messages pointing at the real files. `source` may also be
    an absolute path; its includes are looked for beside the including file, then in kernels/, then
    in kernels/common/. Raises FileNotFoundError when the file or an included header does not exist.
    """
    kernels = arch.KERNELS_DIR
    return _flatten(source, kernels, _stamp(kernels / source, *_headers(kernels)))


@lru_cache(maxsize=128)
def bare(text: str) -> str:
    """`text` without comments, empty lines and numbers of lines: what machine code depends on."""
    text = _COMMENT.sub(lambda found: found[0] if found[0].startswith('"') else " ", text)
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("#line "))


def digest() -> str:
    """SHA-256 over kernels/ without comments, in hexadecimal digits: changes when a kernel does."""
    kernels = arch.KERNELS_DIR
    return _digest(kernels, _stamp(*_files(kernels)))


@lru_cache(maxsize=4)
def _digest(kernels: Path, stamp: tuple[object, ...]) -> str:
    digest = hashlib.sha256()
    for file in _files(kernels):
        text = bare(file.read_text(encoding="utf-8"))
        digest.update(file.name.encode() + hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


def _headers(kernels: Path) -> list[Path]:
    """What kernels include: common/, and nvidia/ for the development cards."""
    return sorted(kernels.glob("*/*.h"))


def _files(kernels: Path) -> list[Path]:
    return [*sorted(kernels.glob("*.hip")), *_headers(kernels)]


def _stamp(*files: Path) -> tuple[object, ...]:
    """Changes when one of these files was written, or others are given."""
    stats = ((file, file.stat()) for file in files)
    return tuple((file, status.st_mtime_ns, status.st_size) for file, status in stats)


@lru_cache(maxsize=64)
def _flatten(source: str, kernels: Path, stamp: tuple[object, ...]) -> str:
    path = kernels / source
    return _Flattener(kernels, path.parent).run(path)


@dataclass
class _Flattener:
    kernels: Path
    root: Path
    """Where the source lies, whose headers come before those of `kernels`."""
    seen: set[Path] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)

    def run(self, path: Path) -> str:
        self.add(path.resolve())
        return "\n".join(self.lines) + "\n"

    def add(self, path: Path) -> None:
        self.seen.add(path)
        name = self.shown(path)
        self.lines.append(f'#line 1 "{name}"')
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            include = _INCLUDE.match(line)
            header = self.find(include.group(1), path) if include else None
            if header is not None:
                if header not in self.seen:
                    self.add(header)
                self.lines.append(f'#line {number + 1} "{name}"')
            elif _PRAGMA_ONCE.match(line):
                self.lines.append("")
            else:
                self.lines.append(line)

    def find(self, header: str, includer: Path) -> Path | None:
        for folder in (includer.parent, self.root, self.kernels, self.kernels / "common"):
            if (folder / header).is_file():
                return (folder / header).resolve()
        if Path(header).name == _SHIM_HEADER:
            return None
        raise FileNotFoundError(
            f'{self.shown(includer)} includes "{header}", which is not in {self.kernels}'
        )

    def shown(self, path: Path) -> str:
        root = self.kernels.resolve()
        return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
