"""hip.c as a loaded library, with its own test functions typed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.runtime.code_objects import c_library

SOURCE = Path(__file__).parent / "hip.c"
EXECUTE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_char_p,
    ctypes.c_uint,
    ctypes.c_uint,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
)
MACHINES = {"gfx1100": 0x41, "gfx1151": 0x4A, "gfx1201": 0x4E, "gfx942": 0x4C, "gfx90a": 0x3F}
"""EF_AMDGPU_MACH of LLVM's user guide for AMDGPU."""


def built(folder: Path) -> Path:
    """The library, named as AMD's is; skips the test where there is no C compiler."""
    path = folder / "libamdhip64.so.6"
    return c_library(SOURCE.read_text(encoding="utf-8"), path, "-std=gnu11", "-O1")


def typed(library: ctypes.CDLL) -> ctypes.CDLL:
    """`library` with prototypes for what hip.c exports to tests; those of HIP are left alone."""
    for name in ("test_notes", "test_complaints"):
        getattr(library, name).restype = ctypes.c_char_p
    library.test_fail.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.test_stream.restype = ctypes.c_void_p
    return library


def opened(path: Path) -> ctypes.CDLL:
    """A handle of its own, so that the prototypes set on one are not another's."""
    return typed(ctypes.CDLL(str(path)))


def fail(library: Any, call: str, status: int) -> None:
    """Let the next `call` return `status`."""
    library.test_fail(call.encode(), status)


def notes(library: Any) -> list[str]:
    """The calls since the last time that were right."""
    return list(library.test_notes().decode().splitlines())


def complaints(library: Any) -> list[str]:
    """What was wrong with calls since the last time."""
    return list(library.test_complaints().decode().splitlines())


def set_executor(library: Any, function: Callable[..., int] | None) -> Any:
    """What launches are handed to; the result must be kept as long as it may be called."""
    made = EXECUTE(function) if function else EXECUTE()
    library.test_set_executor.argtypes = [EXECUTE]
    library.test_set_executor(made)
    return made
