"""What tests compile: made once, kept on disk for all workers and for later runs.

An entry is a folder, named by a hash of all that decides what is in it: the flattened source,
entry, definitions, options, the compiler's file. It appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from lib_rocm_sd.arch import KERNELS_DIR, Arch
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import source
from lib_rocm_sd.runtime.compiler import (
    LANGUAGE_OPTIONS,
    OPTIONS_VERSION,
    Compiler,
    defines_options,
)

if TYPE_CHECKING:
    from tests.noted import Notes

CHECKOUT = Path(__file__).resolve().parent.parent
FOLDER = Path(os.environ.get("ROCM_SD_TEST_CACHE") or CHECKOUT / ".cache") / "compiled"
KEPT_S = 7 * 24 * 3600
MOST_BYTES = 1 << 30
"""An entry that was not used for so long is removed; and the oldest, where all take more."""

noting: Notes | None = None
"""Is told what would be compiled and launched. Nothing is then."""


class Noted(Exception):  # noqa: N818 - nothing went wrong
    """All that a test launches was noted."""


@lru_cache(maxsize=256)
def text_of(path: Path) -> str:
    """A kernel file with its headers: what machine code depends on."""
    return source.bare(source.flatten(str(path)))


def hash_of(*parts: object) -> str:
    """32 hexadecimal digits."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@cache
def version_of(*program: str) -> str:
    """Such as "19.1.7", of a clang's command line; empty where it does not say."""
    try:
        done = subprocess.run(
            [*program, "--version"], capture_output=True, timeout=600, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"clang version (\d+\.\d+\.\d+)", done.stdout.decode(errors="replace"))
    return found[1] if found else ""


def code(
    compiler: Compiler, spec: KernelSpec, arch: Arch, kernels_dir: Path = KERNELS_DIR
) -> bytes:
    """The code object that `compiler` makes of a kernel in `kernels_dir`. Raises CompileError."""
    if noting is not None:
        return noting.compile(spec, arch, kernels_dir)
    path = kernels_dir / spec.source
    defines = {**arch.defines(), **dict(spec.defines)}
    options = (OPTIONS_VERSION, *LANGUAGE_OPTIONS, *defines_options(defines))

    def make(made: Path) -> None:
        text = source.flatten(str(path))
        compiled = compiler.compile(text, spec.entry, arch, defines, spec.source)
        (made / "code.co").write_bytes(compiled)

    key = hash_of(text_of(path), spec.entry, arch.gfx, options, compiler.identity())
    return (entry(key, make) / "code.co").read_bytes()


def entry(key: str, make: Callable[[Path], None]) -> Path:
    """The folder of this name; where there is none, what `make` puts into an empty one."""
    final = FOLDER / key
    while True:
        with contextlib.suppress(FileNotFoundError):
            os.utime(final)
            return final
        _prune()
        with tempfile.TemporaryDirectory(prefix=".new-", dir=FOLDER) as folder:
            made = Path(folder, "made")
            made.mkdir()
            make(made)
            _keep(made, final)


def _keep(made: Path, final: Path) -> None:
    """Whoever comes second leaves the first one's."""
    try:
        made.replace(final)
    except OSError:
        if not final.is_dir():
            raise


@cache
def _prune() -> None:
    """Once per process."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for folder in _superfluous(_entries(), time.time()):
        shutil.rmtree(folder, ignore_errors=True)


def _entries() -> list[tuple[float, int, Path]]:
    """When each was used, its bytes, its folder. Other processes may remove some meanwhile."""
    found = []
    for folder in FOLDER.iterdir():
        with contextlib.suppress(OSError):
            size = sum(file.stat().st_size for file in folder.rglob("*"))
            found.append((folder.stat().st_mtime, size, folder))
    return found


def _superfluous(entries: Sequence[tuple[float, int, Path]], now: float) -> list[Path]:
    """What is too old, or the oldest of too much."""
    gone, total = [], 0
    for used, size, folder in sorted(entries, reverse=True):
        total += size
        if used < now - KEPT_S or total > MOST_BYTES:
            gone.append(folder)
    return gone
