"""The parts of a driver library that HIP's and CUDA's share: what loads and launches."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_void_p
from functools import cache, partial
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.errors import DeviceOutOfMemoryError, LaunchError

_BUFFER_POINTER, _BUFFER_SIZE = 1, 2
"""HIP_LAUNCH_PARAM_* and CU_LAUNCH_PARAM_*."""


def typed(library: ctypes.CDLL, signatures: Mapping[str, Sequence[Any]]) -> ctypes.CDLL:
    """`library` with the prototypes of these functions, which all return a status."""
    for name, types in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, c_int
    return library


class Driver(ABC):
    """The calls of one driver library. Every status is checked; handles are plain integers.

    Raises LaunchError with the library's own words, or DeviceOutOfMemoryError.
    """

    translate: Callable[[int], int] | None = None
    """What makes this library's stream of one of torch's, where these are others except for the
    default one, which is 0 to both; raises LaunchError.
    """
    _load_name: str
    _function_name: str
    _launch_name: str
    _end: int
    """Tag at the end of a launch's `extra`."""

    def __init__(self, library: ctypes.CDLL, **others: Sequence[Any]) -> None:
        signatures: dict[str, Sequence[Any]] = {
            self._load_name: [POINTER(c_void_p), c_char_p],
            self._function_name: [POINTER(c_void_p), c_void_p, c_char_p],
            self._launch_name: [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p],
        }
        self._library = typed(library, {**signatures, **others})
        self._launch = getattr(library, self._launch_name)

    def load(self, code: bytes) -> int:
        """Load a code object on the current device; the module's handle."""
        module = c_void_p()
        self._call(self._load_name, byref(module), code)
        return module.value or 0

    def function(self, module: int, entry: str) -> int:
        """The handle of a kernel in a module."""
        function = c_void_p()
        self._call(self._function_name, byref(function), module, entry.encode())
        return function.value or 0

    def dynamic_lds_bytes(self, module: int, function: int) -> int:
        """How much LDS a launch must ask for, beyond what the code object itself states.

        Prepares the function for it.
        """
        return 0

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
        self.prepared(function, grid, block, lds_bytes, params)(stream)

    def prepared(
        self, function: int, grid: int, block: int, lds_bytes: int, params: ctypes.Structure
    ) -> Callable[[int], None]:
        """`launch`, to be repeated on the stream that it is given, with what `params` then holds.

        It keeps `params` alive.
        """
        sizes = launch_sizes(function, grid, block, lds_bytes)
        extra = packed(params, _BUFFER_POINTER, _BUFFER_SIZE, self._end)
        return partial(self._start, sizes, *extra)

    def _start(self, sizes: tuple[Any, ...], extra: Any, kept: Any, stream: int) -> None:
        status = self._launch(*sizes, stream, None, extra)
        if status:
            self.check(self._launch_name, status)

    def arch(self, arch: Arch, index: int) -> Arch:
        """The row that code for the device `index` is built for."""
        return arch

    def _call(self, name: str, *arguments: Any) -> None:
        self.check(name, getattr(self._library, name)(*arguments))

    @abstractmethod
    def check(self, call: str, status: int) -> None:
        """Raise, in the library's words, for a status other than success."""


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
