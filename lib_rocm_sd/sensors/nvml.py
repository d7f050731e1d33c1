"""The development card: NVIDIA's management library, which comes with the driver.

Signatures as nvml.h has them. Power is a mean over a second on Ampere and newer (but not GA100).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

from lib_rocm_sd.sensors.reading import Reading

LIBRARIES = ("nvml.dll",) if sys.platform == "win32" else ("libnvidia-ml.so.1",)
CORE, MEMORY = 0, 2
"""nvmlClockType_t: NVML_CLOCK_GRAPHICS and NVML_CLOCK_MEM."""
_WORD = ctypes.POINTER(ctypes.c_uint)
_HANDLE = ctypes.c_void_p
SIGNATURES: dict[str, list[Any]] = {
    "nvmlInit_v2": [],
    "nvmlShutdown": [],
    "nvmlDeviceGetCount_v2": [_WORD],
    "nvmlDeviceGetHandleByIndex_v2": [ctypes.c_uint, ctypes.POINTER(_HANDLE)],
    "nvmlDeviceGetHandleByPciBusId_v2": [ctypes.c_char_p, ctypes.POINTER(_HANDLE)],
    "nvmlDeviceGetPowerUsage": [_HANDLE, _WORD],
    "nvmlDeviceGetClockInfo": [_HANDLE, ctypes.c_int, _WORD],
}
"""Arguments; each returns nvmlReturn_t, an int, 0 for success."""


def loaded() -> Any:
    """The library; OSError where there is none."""
    failed = OSError("NVML has no name on this system")
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            failed = error
    raise failed


class Nvml:
    """Reads one card through `library`, which is ready; see `source`."""

    origin = "NVML"

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    def read(self) -> Reading:
        """What a card does not support is None."""
        library, handle = self._library, self._handle
        power = _asked(library.nvmlDeviceGetPowerUsage, handle)
        core, memory = (
            _asked(library.nvmlDeviceGetClockInfo, handle, kind) for kind in (CORE, MEMORY)
        )
        return Reading(None if power is None else power / 1000, core, memory)

    def close(self) -> None:
        """As many shutdowns as there were starts; others in this process are counted too."""
        self._library.nvmlShutdown()


def source(address: str, load: Callable[[], Any] = loaded) -> Nvml | str:
    """The sensor source for the card with this PCI address, or for the only card if the address is
    empty; a str says why there is none.
    """
    try:
        library = load()
        for name, arguments in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
    except (OSError, AttributeError) as error:
        return f"NVML cannot be used: {error}"
    started = library.nvmlInit_v2()
    if started:
        return f"NVML does not start: error {started}"
    found = _handle(library, address)
    if isinstance(found, str):
        library.nvmlShutdown()
        return found
    return Nvml(library, found)


def _handle(library: Any, address: str) -> Any:
    """The card's, or why there is none."""
    handle, count = _HANDLE(), ctypes.c_uint(0)
    if address:
        given = address.encode()
        failed = library.nvmlDeviceGetHandleByPciBusId_v2(given, ctypes.byref(handle))
        return f"NVML does not know {address}: error {failed}" if failed else handle
    failed = library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    if failed or count.value != 1:
        return f"torch does not say which of {count.value} NVIDIA cards it is"
    failed = library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
    return f"NVML does not give its card: error {failed}" if failed else handle


def _asked(function: Any, *arguments: Any) -> float | None:
    value = ctypes.c_uint(0)
    failed = function(*arguments, ctypes.byref(value))
    return None if failed else float(value.value)
