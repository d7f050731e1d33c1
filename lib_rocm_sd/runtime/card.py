"""Memory, streams and facts of one card, by HIP or CUDA alone: for a process without torch."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_void_p
from dataclasses import dataclass
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime.cuda import CudaDriver
from lib_rocm_sd.runtime.driver import Driver, typed
from lib_rocm_sd.runtime.hip import HipDriver
from lib_rocm_sd.runtime.launcher import Launcher

_NON_BLOCKING = 1
_TO_DEVICE, _TO_HOST = 1, 2  # hipMemcpyKind


@dataclass(frozen=True)
class _Names:
    """What HIP and CUDA call the same thing, with the same arguments."""

    allocate: str
    free: str
    fill: str
    synchronise: str
    memory: str
    stream: str


class BareCard(ABC):
    """One device; opened by the thread that uses it. Addresses and handles are integers.

    Raises LaunchError or DeviceOutOfMemoryError.
    """

    driver: HipDriver | CudaDriver
    _names: _Names
    _library: ctypes.CDLL

    @abstractmethod
    def write(self, address: int, data: bytes) -> None: ...

    @abstractmethod
    def read(self, address: int, size: int) -> bytes: ...

    def allocate(self, size: int) -> int:
        address = c_void_p()
        self._call(self._names.allocate, byref(address), size)
        return address.value or 0

    def free(self, address: int) -> None:
        self._call(self._names.free, address)

    def fill(self, address: int, byte: int, size: int) -> None:
        self._call(self._names.fill, address, byte, size)

    def synchronise(self) -> None:
        """Until all that was launched is done; raises what it died of."""
        self._call(self._names.synchronise)

    def free_bytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        self._call(self._names.memory, byref(free), byref(total))
        return free.value

    def new_stream(self) -> int:
        """One that does not wait for the default stream, as torch's are."""
        stream = c_void_p()
        self._call(self._names.stream, byref(stream), _NON_BLOCKING)
        return stream.value or 0

    def _call(self, name: str, *arguments: Any) -> None:
        self.driver.check(name, getattr(self._library, name)(*arguments))

    def _typed(self, library: ctypes.CDLL, byte: Any, **others: list[Any]) -> ctypes.CDLL:
        """With prototypes. `byte`: what `fill` takes one as; `others`: the class's own calls."""
        names = self._names
        signatures: dict[str, list[Any]] = {
            names.allocate: [POINTER(c_void_p), c_size_t],
            names.free: [c_void_p],
            names.fill: [c_void_p, byte, c_size_t],
            names.synchronise: [],
            names.memory: [POINTER(c_size_t), POINTER(c_size_t)],
            names.stream: [POINTER(c_void_p), c_uint],
        }
        return typed(library, {**signatures, **others})


class HipCard(BareCard):
    """`library`: a loaded libamdhip64."""

    _names = _Names(
        "hipMalloc",
        "hipFree",
        "hipMemset",
        "hipDeviceSynchronize",
        "hipMemGetInfo",
        "hipStreamCreateWithFlags",
    )

    def __init__(self, library: ctypes.CDLL, index: int) -> None:
        self.driver: HipDriver = HipDriver(library)
        self._library = self._typed(
            library,
            c_int,
            hipSetDevice=[c_int],
            hipMemcpy=[c_void_p, c_void_p, c_size_t, c_int],
        )
        self._call("hipSetDevice", index)

    def write(self, address: int, data: bytes) -> None:
        self._call("hipMemcpy", address, c_char_p(data), len(data), _TO_DEVICE)

    def read(self, address: int, size: int) -> bytes:
        contents = ctypes.create_string_buffer(size)
        self._call("hipMemcpy", contents, address, size, _TO_HOST)
        return contents.raw


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

    _names = _Names(
        "cuMemAlloc_v2",
        "cuMemFree_v2",
        "cuMemsetD8_v2",
        "cuCtxSynchronize",
        "cuMemGetInfo_v2",
        "cuStreamCreate",
    )

    def __init__(self, library: ctypes.CDLL, index: int) -> None:
        self.driver: CudaDriver = _BareCuda(library, index)
        self._library = self._typed(
            library,
            c_ubyte,
            cuInit=[c_uint],
            cuMemcpyHtoD_v2=[c_void_p, c_void_p, c_size_t],
            cuMemcpyDtoH_v2=[c_void_p, c_void_p, c_size_t],
        )
        self._call("cuInit", 0)
        self.driver.bind_context()

    def write(self, address: int, data: bytes) -> None:
        self._call("cuMemcpyHtoD_v2", address, c_char_p(data), len(data))

    def read(self, address: int, size: int) -> bytes:
        contents = ctypes.create_string_buffer(size)
        self._call("cuMemcpyDtoH_v2", contents, address, size)
        return contents.raw


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
