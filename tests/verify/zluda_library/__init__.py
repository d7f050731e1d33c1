"""A ZLUDA of either family above the stand-in HIP, and torch's side of it."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import replace
from pathlib import Path
from typing import Any

from lib_rocm_sd.runtime.hip import HipDriver
from lib_rocm_sd.runtime.layouts import AMDHIP64
from lib_rocm_sd.runtime.zluda import Nvcuda, Zluda
from tests.runtime.code_objects import c_library
from tests.runtime.driver_doubles import ScaleParams
from tests.verify import hip_library

FOLDER = Path(__file__).parent
BOXED = ("-DBOXED", "-DVERSION=12020")
PLAIN = ("-DVERSION=13000",)
UNKNOWN = ("-DVERSION=11080",)
COUNT = 64
"""Floats in a tensor."""


HIP = replace(AMDHIP64, linux=r"libbeneath\.so[.\d]*")
"""What `zluda.AMDHIP64` has to be for them."""
_numbers = itertools.count()


def built(folder: Path, *family: str) -> Zluda:
    """The two libraries; skips the test where there is no C compiler.

    Each HIP has a name of its own: of those with one name, the loader takes the first for all. It
    is no name of AMD's, by which other tests of this process would find it.
    """
    name = f"libbeneath.so.{next(_numbers)}"
    source = hip_library.SOURCE.read_text() + (FOLDER / "hip_more.c").read_text()
    beneath = c_library(source, folder / name, "-std=gnu11", "-O1")
    link = (f"-L{folder}", f"-l:{name}", f"-Wl,-rpath,{folder}")
    source = (FOLDER / "nvcuda.c").read_text()
    return Zluda(c_library(source, folder / "libnvcuda.so", *family, *link), beneath)


class Torch:
    """Torch as ZLUDA sees it: memory that is used again, work on a current stream, no waiting.

    Ours is tests/data's `scale`, which doubles what it reads there.
    """

    def __init__(self, here: Zluda, code: bytes) -> None:
        library = ctypes.CDLL(str(here.hip))
        self.nvcuda = ctypes.CDLL(str(here.nvcuda))
        self.nvcuda.cuMemsetD32Async.argtypes = [c_uint64, c_int, c_size_t, c_uint64]
        self.nvcuda.cuMemcpyDtoHAsync_v2.argtypes = [c_void_p, c_uint64, c_size_t, c_uint64]
        self.nvcuda.cuStreamSynchronize.argtypes = [c_uint64]
        self.driver = HipDriver(library, Nvcuda(self.nvcuda).hip_stream)
        self._function = self.driver.function(self.driver.load(code), "scale")
        self._code = code
        self._buffers = [self.memory() for _ in range(6)]
        self._seen: list[tuple[int, Any]] = []
        self.stream = 0

    def warm(self) -> None:
        assert self.nvcuda.cuMemsetD32Async(self.memory(), 0, COUNT, 0) == 0
        assert self.wrong() == 0

    def memory(self) -> int:
        address = c_uint64()
        assert self.nvcuda.cuMemAlloc_v2(byref(address), c_size_t(4 * COUNT)) == 0
        return address.value

    @contextmanager
    def other_stream(self) -> Iterator[None]:
        handle = c_uint64()
        assert self.nvcuda.cuStreamCreate(byref(handle), 1) == 0
        self.stream = handle.value
        yield
        self.stream = 0

    def round(self, number: int) -> None:
        self._buffers = self._buffers[2:] + self._buffers[:2]
        source, out, *_ = self._buffers
        bits = int.from_bytes(ctypes.c_float(number), "little")
        assert self.nvcuda.cuMemsetD32Async(source, bits, COUNT, self.stream) == 0
        translate, handle = self.driver.translate, self.stream
        assert translate is not None
        params = ScaleParams(source, out, COUNT, 1.0)
        hip_stream = translate(handle) if handle else handle
        self.driver.launch(self._function, 1, 64, 0, hip_stream, params)
        self._seen.append((number, (ctypes.c_float * COUNT)()))
        read = self._seen[-1][1]
        assert self.nvcuda.cuMemcpyDtoHAsync_v2(read, out, 4 * COUNT, self.stream) == 0

    def wrong(self) -> int:
        assert self.nvcuda.cuStreamSynchronize(self.stream) == 0
        seen, self._seen = self._seen, []
        return sum(any(value != 2 * number for value in read) for number, read in seen)
