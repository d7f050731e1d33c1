"""What a driver library is to the launcher, and the parts that HIP's and CUDA's share."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.errors import DeviceOutOfMemoryError, LaunchError


class Driver(ABC):
    """The calls of one driver library. Every status is checked; handles are plain integers.

    Raises LaunchError with the library's own words, or DeviceOutOfMemoryError.
    """

    default_stream_only = False
    """True where a stream of torch's means nothing to this library, except the default one, which
    is 0 to both.
    """

    @abstractmethod
    def load(self, code: bytes) -> int:
        """Load a code object on the current device; the module's handle."""

    @abstractmethod
    def function(self, module: int, entry: str) -> int:
        """The handle of a kernel in a module."""

    @abstractmethod
    def dynamic_lds_bytes(self, module: int, function: int) -> int:
        """How much LDS a launch must ask for, beyond what the code object itself states.

        Prepares the function for it.
        """

    @abstractmethod
    def launch(
        self,
        function: int,
        grid: int,
        block: int,
        lds_bytes: int,
        stream: int,
        params: ctypes.Structure,
    ) -> None:
        """Launch on the stream with this handle; 0 is the default one.

        `params` is the kernel's one argument, copied at once.
        """

    def prepared(
        self, function: int, grid: int, block: int, lds_bytes: int, params: ctypes.Structure
    ) -> Callable[[int], None]:
        """`launch`, to be repeated on the stream that it is given, with what `params` then holds.

        It keeps `params` alive.
        """

        def start(stream: int) -> None:
            self.launch(function, grid, block, lds_bytes, stream, params)

        return start

    def arch(self, arch: Arch, index: int) -> Arch:
        """The row that code for the device `index` is built for."""
        return arch


def raise_status(call: str, status: int, text: str) -> None:
    """Raise for a driver status other than success.

    HIP and CUDA both give 2 to running out of memory.
    """
    message = f"{call}: {text} ({status})"
    if status == 2:
        raise DeviceOutOfMemoryError(message)
    raise LaunchError(message, status)


def packed(
    params: ctypes.Structure, pointer_tag: int, size_tag: int, end_tag: int
) -> tuple[Any, tuple[Any, ...]]:
    """The `extra` argument of a launch, which hands over all arguments as one buffer, and what it
    points to.

    Both must live until the launch returns.
    """
    size = _size_of(type(params))
    extra = _EXTRA(pointer_tag, ctypes.addressof(params), size_tag, ctypes.addressof(size), end_tag)
    return ctypes.c_void_p(ctypes.addressof(extra)), (extra, params, size)


def launch_sizes(function: int, grid: int, block: int, lds_bytes: int) -> tuple[Any, ...]:
    """The first eight arguments of a launch, as C has them: then a call need not convert them."""
    one = _ONE
    sizes = (ctypes.c_uint(grid), one, one, ctypes.c_uint(block), one, one)
    return (ctypes.c_void_p(function), *sizes, ctypes.c_uint(lds_bytes))


_EXTRA = ctypes.c_void_p * 5
_ONE = ctypes.c_uint(1)


@cache
def _size_of(params: type[ctypes.Structure]) -> ctypes.c_size_t:
    return ctypes.c_size_t(ctypes.sizeof(params))
