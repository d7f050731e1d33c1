"""The HIP runtime by ctypes: the library that torch has loaded, never a second copy beside it."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_void_p
from pathlib import Path

from lib_rocm_sd.errors import LaunchError
from lib_rocm_sd.runtime import libraries
from lib_rocm_sd.runtime.driver import Driver, raise_status

_NAME = re.compile(r"(libamdhip64\.so[.\d]*|amdhip64(_\d+)?\.dll)$", re.IGNORECASE)


class HipDriver(Driver):
    """`library` is a loaded libamdhip64."""

    _load_name, _function_name = "hipModuleLoadData", "hipModuleGetFunction"
    _launch_name, _end = "hipModuleLaunchKernel", 3

    def __init__(self, library: ctypes.CDLL, default_stream_only: bool = False) -> None:
        super().__init__(library, hipGetLastError=[])
        self.default_stream_only = default_stream_only
        self._text = library.hipGetErrorString
        self._text.argtypes, self._text.restype = [c_int], c_char_p

    def check(self, call: str, status: int) -> None:
        if status:
            self._library.hipGetLastError()  # else torch's next call would report our error
            raise_status(call, status, (self._text(status) or b"?").decode())


def library() -> ctypes.CDLL:
    """The HIP runtime in this process; where none is loaded yet, torch's own.

    Raises LaunchError when there is none.
    """
    path = loaded_runtime()
    if path is not None:
        return _handle(path)
    candidates: list[Path] = []
    for folder in libraries.rocm_library_folders():
        named = (path for path in folder.glob("*amdhip64*") if _NAME.fullmatch(path.name))
        candidates += sorted(named, reverse=True)
    for path in candidates:
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    raise LaunchError(f"no HIP runtime is loaded or can be: {[*map(str, candidates)]}")


def loaded_runtime() -> Path | None:
    """The file of the HIP runtime in this process, torch's own before others."""
    loaded = [path for path in loaded_libraries() if _NAME.search(path.name)]
    torch = libraries.package_folder("torch")
    near = [
        path for path in loaded if torch is not None and torch.resolve() in path.resolve().parents
    ]
    return next(iter([*near, *loaded]), None)


def _handle(path: Path) -> ctypes.CDLL:
    if sys.platform == "win32":
        return ctypes.CDLL(str(path))  # the loader gives back the module of this path
    import os

    try:
        return ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError as error:
        raise LaunchError(
            f"{path} is mapped into this process and cannot be opened: {error}"
        ) from error


def loaded_libraries() -> Iterator[Path]:
    """The file of every library in this process, each once."""
    if sys.platform == "win32":
        yield from _windows_modules()
        return
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    names = (line.split(maxsplit=5)[-1] for line in lines if "/" in line)
    yield from (Path(name.removesuffix(" (deleted)")) for name in dict.fromkeys(names))


def _windows_modules() -> Iterator[Path]:
    kernel = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined]
    kernel.GetCurrentProcess.restype = c_void_p
    kernel.K32EnumProcessModules.argtypes = [c_void_p, c_void_p, c_uint, POINTER(c_uint)]
    kernel.GetModuleFileNameW.argtypes = [c_void_p, ctypes.c_wchar_p, c_uint]
    modules, needed = (c_void_p * 4096)(), c_uint()
    if not kernel.K32EnumProcessModules(
        kernel.GetCurrentProcess(), modules, ctypes.sizeof(modules), byref(needed)
    ):
        return
    for module in modules[: min(needed.value // ctypes.sizeof(c_void_p), len(modules))]:
        name = ctypes.create_unicode_buffer(4096)
        if kernel.GetModuleFileNameW(module, name, len(name)):
            yield Path(name.value)
