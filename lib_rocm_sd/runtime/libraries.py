"""Where the shared libraries of ROCm and CUDA lie on this machine.

Nothing is loaded and torch is not imported.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from lib_rocm_sd.runtime import layouts
from lib_rocm_sd.runtime.compiler import file_identity, real_path, remembered
from lib_rocm_sd.runtime.layouts import Library


def rocm_roots() -> list[Path]:
    """Folders laid out like /opt/rocm, in the order of preference."""
    roots = [root for layout in layouts.LAYOUTS if layout.sdk for root in layout.roots()]
    return _unique(root for root in roots if root.is_dir())


def rocm_library_folders() -> list[Path]:
    """Folders that may hold AMD's libraries, in the order of preference: torch's own first."""
    folders = [folder for layout in layouts.LAYOUTS for folder in layout.folders()]
    return _unique(folder for folder in folders if folder.is_dir())


def cuda_library_folders() -> list[Path]:
    """Folders that may hold NVRTC: torch's, NVIDIA's Python packages', the CUDA toolkit's."""
    torch = layouts.package_folder("torch")
    folders = [torch / "lib"] if torch else []
    for nvidia in layouts.package_folders("nvidia"):
        folders += sorted(
            [*nvidia.glob("cu*/lib"), *nvidia.glob("cu*/bin"), *nvidia.glob("cu*/bin/x86_64")],
            reverse=True,
        )
    for name in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(name):
            folders += [Path(os.environ[name]) / part for part in ("bin", "lib64", "lib")]
    folders += [Path("/usr/local/cuda/lib64"), *layouts.LAYOUTS[-1].folders()]
    return _unique(folder for folder in folders if folder.is_dir())


def files(folders: Iterable[Path], library: Library) -> Iterator[Path]:
    """What is called like `library` in `folders`, a folder's newest first, each real file once."""
    seen: set[Path] = set()
    for folder in folders:
        names = (path for path in folder.glob("*") if library.matches(path.name))
        by_version = sorted(names, key=lambda path: (library.version(path.name), path.name))
        for path in reversed(by_version):
            real = real_path(path)
            if real not in seen and path.is_file():
                seen.add(real)
                yield path


def find(folders: Iterable[Path], library: Library) -> tuple[list[Path], list[str]]:
    """Those of `files` that export what `library` does, and why others were passed over."""
    paths: list[Path] = []
    reasons: list[str] = []
    for path in files(folders, library):
        if exports(path, library.symbol):
            paths.append(path)
        else:
            reasons.append(f"{path} does not export {library.symbol}")
    return paths, reasons


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


def imports(path: Path) -> dict[str, int]:
    """The DLLs that a Windows module asks for, also those that it loads at their first use, by
    their names in small letters: where its table of addresses of their functions lies, from its
    beginning. Empty for what is no module.

    Raises OSError where the file cannot be read.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _imports(data)
    except (struct.error, ValueError):
        return {}


def _imports(data: mmap.mmap) -> dict[str, int]:
    """Microsoft, "PE Format": the import directory (1) and the delay import directory (13)."""
    at = struct.unpack_from("<I", data, 0x3C)[0]
    sections, optional_size = struct.unpack_from("<H12xH", data, at + 6)
    if data[:2] != b"MZ" or data[at : at + 4] != b"PE\0\0":
        return {}
    optional = at + 24
    directories = optional + (112 if struct.unpack_from("<H", data, optional)[0] == 0x20B else 96)
    table = [
        struct.unpack_from("<8xIIII", data, optional + optional_size + 40 * index)
        for index in range(sections)
    ]

    def offset(address: int) -> int:
        for size, start, _, place in table:
            if start <= address < start + size:
                return int(place + address - start)
        raise ValueError

    entries: dict[str, int] = {}
    for number, size, name_at, table_at in ((1, 20, 12, 16), (13, 32, 4, 12)):
        start = struct.unpack_from("<I", data, directories + 8 * number)[0]
        row = offset(start) if start else 0
        while row and (name := struct.unpack_from("<I", data, row + name_at)[0]):
            place = offset(name)
            if (end := data.find(b"\0", place)) < 0:
                raise ValueError
            text = data[place:end].decode("ascii", "replace").lower()
            entries.setdefault(text, struct.unpack_from("<I", data, row + table_at)[0])
            row += size
    return entries


def _unique(paths: Iterable[Path]) -> list[Path]:
    return list(dict.fromkeys(paths))
