"""Where the shared libraries of ROCm and CUDA lie on this machine.

Nothing is loaded and torch is not imported.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from lib_rocm_sd.runtime.compiler import file_identity, remembered

_WINDOWS = sys.platform == "win32"
_SYSTEM_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/usr/lib/wsl/lib",
)


def package_folders(name: str) -> list[Path]:
    """The folders of an installed top-level package, more than one for a namespace package.

    Found without importing it.
    """
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    return [Path(place) for place in spec.submodule_search_locations or []] if spec else []


def package_folder(name: str) -> Path | None:
    """The first folder of an installed top-level package."""
    return next(iter(package_folders(name)), None)


def rocm_roots() -> list[Path]:
    """Folders laid out like /opt/rocm: AMD's Python packages, then what the environment names, then
    installations, newest first.
    """
    packages = [package_folder(name) for name in ("_rocm_sdk_core", "_rocm_sdk_devel")]
    named = [os.environ.get(name) for name in ("ROCM_PATH", "ROCM_HOME", "HIP_PATH")]
    if _WINDOWS:
        files = Path(os.environ.get("PROGRAMFILES", r"C:\Program Files"))
        installed = sorted((files / "AMD" / "ROCm").glob("*"), key=_numbers, reverse=True)
    else:
        installed = [
            Path("/opt/rocm"),
            *sorted(Path("/opt").glob("rocm-*"), key=_numbers, reverse=True),
        ]
    roots = [*packages, *(Path(name) for name in named if name), *installed]
    return _unique(root for root in roots if root is not None and root.is_dir())


def rocm_library_folders() -> list[Path]:
    """Folders that may hold AMD's libraries, in the order of preference: torch's own first."""
    torch = package_folder("torch")
    folders = [torch / "lib"] if torch else []
    for root in rocm_roots():
        folders += [root / "bin"] if _WINDOWS else [root / "lib", root / "lib64"]
    if _WINDOWS:
        folders.append(Path(os.environ.get("SYSTEMROOT", r"C:\Windows")) / "System32")
    else:
        folders += [Path(name) for name in _SYSTEM_FOLDERS]
    return _unique(folder for folder in folders if folder.is_dir())


def cuda_library_folders() -> list[Path]:
    """Folders that may hold NVRTC: torch's, NVIDIA's Python packages', the CUDA toolkit's."""
    torch = package_folder("torch")
    folders = [torch / "lib"] if torch else []
    for nvidia in package_folders("nvidia"):
        folders += sorted(
            [*nvidia.glob("cu*/lib"), *nvidia.glob("cu*/bin"), *nvidia.glob("cu*/bin/x86_64")],
            reverse=True,
        )
    for name in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(name):
            folders += [Path(os.environ[name]) / part for part in ("bin", "lib64", "lib")]
    folders += [Path("/usr/local/cuda/lib64"), *(Path(name) for name in _SYSTEM_FOLDERS)]
    return _unique(folder for folder in folders if folder.is_dir())


def find(
    folders: Iterable[Path], patterns: Iterable[str], symbol: str
) -> tuple[list[Path], list[str]]:
    """The libraries in `folders` whose name matches one of `patterns` and that export `symbol`,
    each real file once, and why others were passed over: hiprtc-builtins, for one, matches hiprtc's
    pattern and exports nothing.
    """
    found: list[Path] = []
    reasons: list[str] = []
    for path in _matches(folders, patterns):
        if exports(path, symbol):
            found.append(path)
        else:
            reasons.append(f"{path} does not export {symbol}")
    return found, reasons


def exports(path: Path, symbol: str) -> bool:
    """True when the file's string tables have `symbol`.

    Remembered per file, since some are 100 MB and more.
    """
    identity = file_identity(f"exports {symbol}", path)
    return bool(identity) and bool(remembered(identity, lambda: _contains(path, symbol)))


def _contains(path: Path, symbol: str) -> bool | None:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(b"\0" + symbol.encode() + b"\0") >= 0
    except (OSError, ValueError):
        return None


def _matches(folders: Iterable[Path], patterns: Iterable[str]) -> Iterator[Path]:
    seen: set[Path] = set()
    wanted = list(patterns)
    for folder in folders:
        hits = {hit for pattern in wanted for hit in folder.glob(pattern) if hit.is_file()}
        for hit in sorted(hits, key=lambda path: (_numbers(path), path.name), reverse=True):
            real = hit.resolve()
            if real not in seen:
                seen.add(real)
                yield hit


def _numbers(path: Path) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", path.name))


def _unique(paths: Iterable[Path]) -> list[Path]:
    return list(dict.fromkeys(paths))
