"""ZLUDA: torch's CUDA driver, nvcuda, translates to HIP, beside which our kernels are launched.

Facts read in its sources. Device memory is HIP's, and the default stream HIP's null stream. In
lshqqytiger/ZLUDA 3.x (zluda/src/impl/stream.rs) another CUstream is an object of its own, for which
nvcuda exports `zluda_get_hip_object` (zluda/src/lib.rs, hip_common/src/zluda_ext.rs). From
vosen/ZLUDA 4 on a CUstream is HIP's (zluda_common/src/lib.rs, `from_cuda_transmute`). nvcuda.dll
imports its HIP library, or delays it: version 7, else 6 (zluda/build.rs, zluda/src/os_win.rs).
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Iterable, Sequence
from ctypes import POINTER, byref, c_int, c_size_t, c_uint64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib_rocm_sd.errors import LaunchError
from lib_rocm_sd.runtime import hip, libraries
from lib_rocm_sd.runtime.driver import typed
from lib_rocm_sd.runtime.layouts import AMDHIP64

_NVCUDA = re.compile(r"(nvcuda\.dll|lib(nv)?cuda\.so[.\d]*)$", re.IGNORECASE)
_COMPANION = re.compile(r"(lib)?(nv|cu|zluda|roc|hip|miopen|amd)", re.IGNORECASE)
_SDKS = re.compile(r"(lib)?(roc(blas|solver|sparse|fft)|hip(blas|fft))", re.IGNORECASE)
"""What ZLUDA's cublas and the like call: the SDK's, though HIP itself may be System32's."""
_STREAM = 1
"""The kind of object that is asked for; 0 is a context."""
PLAIN = {12040: "4", 12080: "5", 13000: "6 or 7"}
"""The releases in which a CUstream is HIP's, by the version of CUDA that they report."""
HIP_MAJORS = (6, 7)
ONLY_DEFAULT = "only the default stream works beside this ZLUDA, and another one is current"
CAPTURED = "nothing of ours is launched into a recording beside ZLUDA"


@dataclass(frozen=True)
class Zluda:
    """The files of nvcuda and of the HIP runtime that it calls, both loaded."""

    nvcuda: Path
    hip: Path

    @property
    def digest(self) -> str:
        """SHA-256 of nvcuda."""
        return hashlib.sha256(self.nvcuda.read_bytes()).hexdigest()

    def companions(self) -> list[Path]:
        """The libraries by which another process has this ZLUDA, if it loads them before torch, as
        launchers do (load in modules/zluda_installer.py of AUTOMATIC1111's AMD fork). The first two
        are needed.
        """
        everything = list(hip.loaded_libraries())
        folders = {path.parent for path in everything if _SDKS.match(path.name)}
        folders |= {self.nvcuda.parent, self.hip.parent}
        files = (p for p in everything if p.parent in folders and _COMPANION.match(p.name))
        return list(dict.fromkeys((self.hip, self.nvcuda, *files)))


def loaded() -> Zluda:
    """The one in this process. Raises LaunchError with the reason where there is none, or where
    nothing says which HIP library it calls.
    """
    files = list(hip.loaded_libraries())
    nvcudas = [path for path in files if _NVCUDA.fullmatch(path.name)]
    if len(nvcudas) != 1:
        raise LaunchError(f"ZLUDA's nvcuda is loaded {len(nvcudas)} times: {_names(nvcudas)}")
    here = [path for path in files if AMDHIP64.matches(path.name)]
    runtime = hip.called_by(nvcudas[0])
    if runtime not in here:
        runtime = _delayed(nvcudas[0], here)
    if runtime is None:
        raise LaunchError(f"nothing says which HIP library ZLUDA calls; loaded are {_names(here)}")
    return Zluda(nvcudas[0], runtime)


def _delayed(nvcuda: Path, here: Sequence[Path]) -> Path | None:
    """Functions of a delayed library get their addresses one by one, so the first may have none
    yet, and nothing but the name is known: version 7, and where that is not loaded, 6.
    """
    try:
        names = [name for name in libraries.imports(nvcuda) if AMDHIP64.matches(name)]
    except OSError as error:
        raise LaunchError(f"ZLUDA's nvcuda cannot be read: {error}") from error
    for name in [*names, *(["amdhip64_6.dll"] if "amdhip64_7.dll" in names else [])]:
        same = [path for path in here if path.name.lower() == name]
        if same:
            return same[0] if len(same) == 1 else None
    return None


def _names(paths: Iterable[Path]) -> list[str]:
    return [*map(str, paths)]


class _Object(ctypes.Structure):
    """What zluda_get_hip_object returns."""

    _fields_ = (("code", c_int), ("value", c_uint64))


class Nvcuda:
    """The calls of a loaded nvcuda that are needed here. Raises LaunchError."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = typed(
            library,
            {
                "cuDriverGetVersion": [POINTER(c_int)],
                "cuMemGetAddressRange_v2": [POINTER(c_uint64), POINTER(c_size_t), c_uint64],
            },
        )
        self._object: Any = getattr(library, "zluda_get_hip_object", None)
        if self._object is not None:
            self._object.argtypes, self._object.restype = [c_uint64, c_int], _Object

    @property
    def has_objects(self) -> bool:
        """Streams are objects of its own, and it says which of HIP's each is."""
        return self._object is not None

    def version(self) -> int:
        """The version of CUDA that it reports."""
        number = c_int()
        _check("cuDriverGetVersion", self._library.cuDriverGetVersion(byref(number)))
        return number.value

    def unknown(self) -> str:
        """Why nobody here knows what its streams are; empty where that is known."""
        version = self.version()
        if self.has_objects or version in PLAIN:
            return ""
        supported = ", ".join(f"{name} ({cuda})" for cuda, name in PLAIN.items())
        return (
            f"an unknown ZLUDA, which reports CUDA {version} and exports no zluda_get_hip_object; "
            f"known are 3 and {supported}"
        )

    def range_of(self, address: int) -> tuple[int, int]:
        """Begin and size of the allocation that has `address`."""
        begin, size = c_uint64(), c_size_t()
        status = self._library.cuMemGetAddressRange_v2(byref(begin), byref(size), address)
        _check("cuMemGetAddressRange", status)
        return begin.value, size.value

    def hip_stream(self, handle: int) -> int:
        """HIP's handle of one of torch's streams."""
        if not self.has_objects:
            if self.unknown():
                raise LaunchError(ONLY_DEFAULT)
            return handle
        answer = self._object(handle, _STREAM)
        _check("zluda_get_hip_object", answer.code)
        return int(answer.value)


def _check(call: str, status: int) -> None:
    if status:
        raise LaunchError(f"ZLUDA's {call} failed ({status})", status)


def driver() -> hip.HipDriver:
    """The HIP beneath the ZLUDA of this process, for torch's streams. Raises LaunchError."""
    import torch

    here = loaded()
    nvcuda = Nvcuda(hip.opened(here.nvcuda))

    def translated(handle: int) -> int:
        if torch.cuda.is_current_stream_capturing():
            raise LaunchError(CAPTURED)
        return nvcuda.hip_stream(handle)

    return hip.HipDriver(hip.opened(here.hip), translated)
