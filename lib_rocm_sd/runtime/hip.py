"""The HIP runtime by ctypes: the library that torch has loaded, never a second copy beside it."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_void_p
from pathlib import Path
from typing import Any

from lib_rocm_sd.errors import LaunchError
from lib_rocm_sd.runtime import libraries
from lib_rocm_sd.runtime.compiler import real_path
from lib_rocm_sd.runtime.driver import Driver, raise_status
from lib_rocm_sd.runtime.layouts import AMDHIP64

_CALLERS = ("libtorch_hip", "libc10_hip", "torch_hip", "c10_hip", "nvcuda")
"""What calls HIP for torch; the last is ZLUDA's."""


class HipDriver(Driver):
    """`library` is a loaded libamdhip64; `translate`: see `Driver`."""

    _load_name, _function_name = "hipModuleLoadData", "hipModuleGetFunction"
    _launch_name, _end = "hipModuleLaunchKernel", 3

    def __init__(self, library: ctypes.CDLL, translate: Callable[[int], int] | None = None) -> None:
        super().__init__(library, hipGetLastError=[])
        self.translate = translate
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
        return opened(path)
    candidates = list(libraries.files(libraries.rocm_library_folders(), AMDHIP64))
    for path in candidates:
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    raise LaunchError(f"no HIP runtime is loaded or can be: {[*map(str, candidates)]}")


def loaded_runtime() -> Path | None:
    """The file of the HIP runtime in this process; of several the one that torch calls, else the
    one that is looked for first.
    """
    everything = list(loaded_libraries())
    loaded = [path for path in everything if AMDHIP64.matches(path.name)]
    if len(loaded) < 2:
        return next(iter(loaded), None)
    for path in everything:
        if path.stem.lower() in _CALLERS:
            with suppress(LaunchError, OSError):  # a file that was replaced: by its place, then
                if (runtime := called_by(path)) in loaded:
                    return runtime
    order = libraries.rocm_library_folders()
    places = {real_path(folder): number for number, folder in reversed([*enumerate(order)])}
    return min(loaded, key=lambda path: places.get(real_path(path).parent, len(order)))


def called_by(path: Path) -> Path | None:
    """The HIP runtime whose functions a loaded module calls; None where it calls none yet."""
    if sys.platform == "win32":
        return _windows_called_by(path)
    function = getattr(opened(path), AMDHIP64.symbol, None)  # searches what the module depends on
    if function is None:
        return None
    info = (c_void_p * 4)()  # Dl_info, which begins with the file's name
    ctypes.CDLL(None).dladdr(ctypes.cast(function, c_void_p), info)
    return real_path(Path(os.fsdecode(ctypes.string_at(info[0])))) if info[0] else None


def opened(path: Path) -> ctypes.CDLL:
    """A handle of the library that this process has loaded from `path`. Raises LaunchError."""
    if sys.platform == "win32":
        return ctypes.CDLL(str(path))  # the loader gives back the module of this path
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
    kernel = _kernel32()
    modules, needed = (c_void_p * 4096)(), c_uint()
    if not kernel.K32EnumProcessModules(
        kernel.GetCurrentProcess(), modules, ctypes.sizeof(modules), byref(needed)
    ):
        return
    for module in modules[: min(needed.value // ctypes.sizeof(c_void_p), len(modules))]:
        yield _module_file(kernel, module)


def _windows_called_by(path: Path) -> Path | None:
    """By the address of the first function that the module has of a HIP runtime: two modules of
    one name may be loaded, and Windows tells one of them by it.
    """
    kernel, base = _kernel32(), int(opened(path)._handle)
    for name, table in libraries.imports(path).items():
        if AMDHIP64.matches(name):
            function, module = c_void_p.from_address(base + table), c_void_p()
            # Of an address, without counting it. It is the caller's own before the first call of
            # what is loaded then.
            if kernel.GetModuleHandleExW(4 | 2, function, byref(module)):
                file = _module_file(kernel, module)
                return file if AMDHIP64.matches(file.name) else None
    return None


def _module_file(kernel: Any, module: int | c_void_p | None) -> Path:
    name = ctypes.create_unicode_buffer(32768)
    kernel.GetModuleFileNameW(module, name, len(name))
    return Path(name.value)


def _kernel32() -> Any:
    kernel = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined]
    kernel.GetCurrentProcess.restype = c_void_p
    kernel.K32EnumProcessModules.argtypes = [c_void_p, c_void_p, c_uint, POINTER(c_uint)]
    kernel.GetModuleFileNameW.argtypes = [c_void_p, ctypes.c_wchar_p, c_uint]
    kernel.GetModuleHandleExW.argtypes = [c_uint, c_void_p, POINTER(c_void_p)]
    return kernel
