"""The CUDA driver by ctypes: development on an NVIDIA card, and only with ROCM_SD_ALLOW_CUDA=1."""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from dataclasses import replace
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.errors import LaunchError
from lib_rocm_sd.runtime.driver import Driver, raise_status

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_STATIC_LIMIT_BYTES = 48 * 1024
_INVALID_CONTEXT = 201
_LDS_SYMBOL = b"rocm_sd_lds_bytes"
_NOT_FOUND = 500


class CudaDriver(Driver):
    """`library` is a loaded libcuda."""

    _load_name, _function_name = "cuModuleLoadData", "cuModuleGetFunction"
    _launch_name, _end = "cuLaunchKernel", 0

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(
            library,
            cuModuleGetGlobal_v2=[POINTER(c_void_p), POINTER(c_size_t), c_void_p, c_char_p],
            cuMemcpyDtoH_v2=[c_void_p, c_void_p, c_size_t],
            cuFuncSetAttribute=[c_void_p, c_int, c_int],
            cuGetErrorString=[c_int, POINTER(c_char_p)],
            cuCtxGetDevice=[POINTER(c_int)],
            cuDeviceGet=[POINTER(c_int), c_int],
            cuDevicePrimaryCtxRetain=[POINTER(c_void_p), c_int],
            cuCtxSetCurrent=[c_void_p],
        )

    def arch(self, arch: Arch, index: int) -> Arch:
        """The development row made for the card's own compute capability, since binaries do not run
        on another one.
        """
        import torch

        major, minor = torch.cuda.get_device_capability(index)
        return replace(arch, gfx=f"sm_{major}{minor}")

    def load(self, code: bytes) -> int:
        self.bind_context()
        return super().load(code)

    def dynamic_lds_bytes(self, module: int, function: int) -> int:
        """What the module states in `rocm_sd_lds_bytes`; 0 when it has no such symbol."""
        address, size = c_void_p(), c_size_t()
        status = self._library.cuModuleGetGlobal_v2(
            byref(address), byref(size), module, _LDS_SYMBOL
        )
        if status == _NOT_FOUND:
            return 0
        self.check("cuModuleGetGlobal", status)
        lds_bytes = c_uint()
        self._call("cuMemcpyDtoH_v2", byref(lds_bytes), address, ctypes.sizeof(lds_bytes))
        if lds_bytes.value > _STATIC_LIMIT_BYTES:
            self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, lds_bytes.value)
        return lds_bytes.value

    def _start(self, sizes: tuple[Any, ...], extra: Any, kept: Any, stream: int) -> None:
        status = self._launch(*sizes, stream, None, extra)
        if status == _INVALID_CONTEXT:  # a thread in which the runtime was not used yet
            self.bind_context()
            status = self._launch(*sizes, stream, None, extra)
        if status:
            self.check(self._launch_name, status)

    def bind_context(self) -> None:
        """Make the primary context of torch's current device current in this thread, where no
        context is.
        """
        device, context = c_int(), c_void_p()
        if self._library.cuCtxGetDevice(byref(device)) != 0:
            self._call("cuDeviceGet", byref(device), self._current_device())
            self._call("cuDevicePrimaryCtxRetain", byref(context), device)
            self._call("cuCtxSetCurrent", context)

    def _current_device(self) -> int:
        import torch

        return torch.cuda.current_device()

    def check(self, call: str, status: int) -> None:
        if status:
            text = c_char_p()
            self._library.cuGetErrorString(status, byref(text))
            raise_status(call, status, (text.value or b"?").decode())


def library() -> ctypes.CDLL:
    """The driver's library.

    Raises LaunchError unless ROCM_SD_ALLOW_CUDA=1, and when there is none.
    """
    if os.environ.get("ROCM_SD_ALLOW_CUDA") != "1":
        raise LaunchError("NVIDIA cards are for development only: ROCM_SD_ALLOW_CUDA=1 is not set")
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError as error:
        raise LaunchError(f"no CUDA driver: {error}") from error
