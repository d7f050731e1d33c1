"""Memory, streams and facts of one card, by HIP or CUDA alone: for a process without torch."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_void_p
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime.cuda import CudaDriver
from lib_rocm_sd.runtime.driver import Driver
from lib_rocm_sd.runtime.hip import HipDriver
from lib_rocm_sd.runtime.launcher import Launcher

_NON_BLOCKING = 1
_TO_DEVICE, _TO_HOST = 1, 2  # hipMemcpyKind


class BareCard(ABC):
    """One device; opened by the thread that uses it. Addresses and handles are integers.

    Raises LaunchError or DeviceOutOfMemoryError.
    """

    driver: Driver

    @abstractmethod
    def allocate(self, size: int) -> int: ...

    @abstractmethod
    def free(self, address: int) -> None: ...

    @abstractmethod
    def write(self, address: int, data: bytes) -> None: ...

    @abstractmethod
    def read(self, address: int, size: int) -> bytes: ...

    @abstractmethod
    def fill(self, address: int, byte: int, size: int) -> None: ...

    @abstractmethod
    def synchronise(self) -> None:
        """Until all that was launched is done; raises what it died of."""

    @abstractmethod
    def free_bytes(self) -> int: ...

    @abstractmethod
    def new_stream(self) -> int:
        """One that does not wait for the default stream, as torch's are."""


class HipCard(BareCard):
    """`library`: a loaded libamdhip64."""

    def __init__(self, library: ctypes.CDLL, index: int) -> None:
        self.driver: HipDriver = HipDriver(library)
        self._library = _typed(
            library,
            {
                "hipSetDevice": [c_int],
                "hipMalloc": [POINTER(c_void_p), c_size_t],
                "hipFree": [c_void_p],
                "hipMemcpy": [c_void_p, c_void_p, c_size_t, c_int],
                "hipMemset": [c_void_p, c_int, c_size_t],
                "hipDeviceSynchronize": [],
                "hipMemGetInfo": [POINTER(c_size_t), POINTER(c_size_t)],
                "hipStreamCreateWithFlags": [POINTER(c_void_p), c_uint],
            },
        )
        self._call("hipSetDevice", index)

    def _call(self, name: str, *arguments: Any) -> None:
        self.driver.check(name, getattr(self._library, name)(*arguments))

    def allocate(self, size: int) -> int:
        made = c_void_p()
        self._call("hipMalloc", byref(made), size)
        return made.value or 0

    def free(self, address: int) -> None:
        self._call("hipFree", address)

    def write(self, address: int, data: bytes) -> None:
        self._call("hipMemcpy", address, c_char_p(data), len(data), _TO_DEVICE)

    def read(self, address: int, size: int) -> bytes:
        made = ctypes.create_string_buffer(size)
        self._call("hipMemcpy", made, address, size, _TO_HOST)
        return made.raw

    def fill(self, address: int, byte: int, size: int) -> None:
        self._call("hipMemset", address, byte, size)

    def synchronise(self) -> None:
        self._call("hipDeviceSynchronize")

    def free_bytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        self._call("hipMemGetInfo", byref(free), byref(total))
        return free.value

    def new_stream(self) -> int:
        made = c_void_p()
        self._call("hipStreamCreateWithFlags", byref(made), _NON_BLOCKING)
        return made.value or 0


class _BareCuda(CudaDriver):
    """Asks nothing of torch: the arch is what it is told, the device the one that was opened."""

    def __init__(self, library: ctypes.CDLL, index: int) -> None:
        super().__init__(library)
        self._index = index

    def arch(self, arch: Arch, index: int) -> Arch:
        return arch

    def _current_device(self) -> int:
        return self._index


class CudaCard(BareCard):
    """`library`: a loaded libcuda. For development."""

    def __init__(self, library: ctypes.CDLL, index: int) -> None:
        self.driver: CudaDriver = _BareCuda(library, index)
        self._library = _typed(
            library,
            {
                "cuInit": [c_uint],
                "cuMemAlloc_v2": [POINTER(c_void_p), c_size_t],
                "cuMemFree_v2": [c_void_p],
                "cuMemcpyHtoD_v2": [c_void_p, c_void_p, c_size_t],
                "cuMemcpyDtoH_v2": [c_void_p, c_void_p, c_size_t],
                "cuMemsetD8_v2": [c_void_p, c_ubyte, c_size_t],
                "cuCtxSynchronize": [],
                "cuMemGetInfo_v2": [POINTER(c_size_t), POINTER(c_size_t)],
                "cuStreamCreate": [POINTER(c_void_p), c_uint],
            },
        )
        self._call("cuInit", 0)
        self.driver.bind_context()

    def _call(self, name: str, *arguments: Any) -> None:
        self.driver.check(name, getattr(self._library, name)(*arguments))

    def allocate(self, size: int) -> int:
        made = c_void_p()
        self._call("cuMemAlloc_v2", byref(made), size)
        return made.value or 0

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    def write(self, address: int, data: bytes) -> None:
        self._call("cuMemcpyHtoD_v2", address, c_char_p(data), len(data))

    def read(self, address: int, size: int) -> bytes:
        made = ctypes.create_string_buffer(size)
        self._call("cuMemcpyDtoH_v2", made, address, size)
        return made.raw

    def fill(self, address: int, byte: int, size: int) -> None:
        self._call("cuMemsetD8_v2", address, byte, size)

    def synchronise(self) -> None:
        self._call("cuCtxSynchronize")

    def free_bytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def new_stream(self) -> int:
        made = c_void_p()
        self._call("cuStreamCreate", byref(made), _NON_BLOCKING)
        return made.value or 0


def _typed(library: ctypes.CDLL, signatures: dict[str, list[Any]]) -> ctypes.CDLL:
    for name, types in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, c_int
    return library


class BareLauncher(Launcher):
    """The launcher without torch: `code` gives machine code, `stream` is the current one."""

    def __init__(
        self, driver: Driver, index: int, arch: Arch, code: Callable[[KernelSpec], bytes]
    ) -> None:
        self.stream = 0
        self._given = code
        super().__init__(driver, index, arch)

    def _calls(self) -> tuple[Callable[[int], int], Callable[[], int]]:
        return (lambda index: self.stream), (lambda: self._index)

    def _capturing(self) -> bool:
        return False

    def _code(self, spec: KernelSpec) -> bytes:
        return self._given(spec)
