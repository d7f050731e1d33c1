"""python calls.py LIBRARY CODE OTHER: a libamdhip64's status to each function that our double has,
with good and bad arguments, and its words; as JSON.

Left out is what ends the process with the real one: a launch of a foreign function or without its
arguments, an ELF file that is no code object, with HIP 5.2 a foreign stream. Without torch: it runs
under another C library.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

TYPES: dict[str, list[Any]] = {
    "hipSetDevice": [c_int],
    "hipDriverGetVersion": [POINTER(c_int)],
    "hipRuntimeGetVersion": [POINTER(c_int)],
    "hipMemGetInfo": [POINTER(c_size_t), POINTER(c_size_t)],
    "hipMalloc": [POINTER(c_void_p), c_size_t],
    "hipFree": [c_void_p],
    "hipMemset": [c_void_p, c_int, c_size_t],
    "hipMemcpy": [c_void_p, c_void_p, c_size_t, c_int],
    "hipStreamCreateWithFlags": [POINTER(c_void_p), c_uint],
    "hipDeviceSynchronize": [],
    "hipModuleLoadData": [POINTER(c_void_p), c_char_p],
    "hipModuleGetFunction": [POINTER(c_void_p), c_void_p, c_char_p],
    "hipModuleLaunchKernel": [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p],
    "hipGetLastError": [],
}
STATUSES = (0, 1, 2, 9, 98, 100, 101, 200, 209, 218, 303, 400, 500, 700, 701, 719, 12345)
SIZE = 256


def asked(library: Any, code: bytes, other: bytes) -> Iterator[tuple[str, int]]:
    """What is asked, in words, and the status."""
    host = ctypes.create_string_buffer(2 * SIZE)
    outside, version, count = ctypes.addressof(host), c_int(), c_size_t()
    pointer, stream, module = c_void_p(), c_void_p(), c_void_p()
    for device in (0, 1, -1):
        yield f"device {device}", library.hipSetDevice(device)
    library.hipSetDevice(0)
    for each in ("Driver", "Runtime"):
        function = getattr(library, f"hip{each}GetVersion")
        yield f"{each} version", function(byref(version))
        yield f"{each} version into null", function(None)
    yield "memory info", library.hipMemGetInfo(byref(count), byref(count))
    yield "allocate into null", library.hipMalloc(None, SIZE)
    yield "allocate too much", library.hipMalloc(byref(pointer), 1 << 40)
    yield "allocate nothing", library.hipMalloc(byref(pointer), 0)
    yield "it is null", int(pointer.value is not None)
    yield "allocate", library.hipMalloc(byref(pointer), SIZE)
    at = pointer.value or 0
    yield from _copies(library, at, outside)
    yield "free null", library.hipFree(None)
    yield "free host memory", library.hipFree(outside)
    yield "free", library.hipFree(at)
    yield "free twice", library.hipFree(at)
    for flags in (1, 0, 2):
        yield f"stream {flags}", library.hipStreamCreateWithFlags(byref(stream), flags)
    yield "stream into null", library.hipStreamCreateWithFlags(None, 1)
    library.hipStreamCreateWithFlags(byref(stream), 1)
    yield "load", library.hipModuleLoadData(byref(module), code)
    handle = module.value or 0
    yield "load into null", library.hipModuleLoadData(None, code)
    yield "load null", library.hipModuleLoadData(byref(module), None)
    yield "load another GPU's", library.hipModuleLoadData(byref(module), other)
    yield "load what is no code", library.hipModuleLoadData(byref(module), b"\0" * 4096)
    find = library.hipModuleGetFunction
    yield "function", find(byref(pointer), handle, b"scale")
    yield from _launches(library, pointer.value or 0, stream.value or 0, outside)
    yield "function into null", find(None, handle, b"scale")
    yield "function of null", find(byref(pointer), None, b"scale")
    yield "function of no module", find(byref(pointer), outside, b"scale")
    for name in (b"other", b"", None):
        yield f"function {name!r}", find(byref(pointer), handle, name)


def _copies(library: Any, at: int, outside: int) -> Iterator[tuple[str, int]]:
    fill, copy = library.hipMemset, library.hipMemcpy
    for name, place, size in (
        *(("fill", at, SIZE), ("fill nothing", 0, 0), ("fill null", 0, 8)),
        *(("fill past the end", at, SIZE + 1), ("fill host memory", outside, 8)),
    ):
        yield name, fill(place, 5, size)
    yield "fill past the end from within", fill(at + SIZE - 8, 5, 9)
    for kind in (0, 1, 2, 3, 4, -1):
        yield f"write, kind {kind}", copy(at, outside, SIZE, kind)
        yield f"read, kind {kind}", copy(outside, at, SIZE, kind)
    for name, place, size in (
        *(("nothing", 0, 0), ("to null", 0, 8), ("host memory", outside + SIZE, 8)),
        *(("past the end", at, SIZE + 1), ("past the end from within", at + SIZE - 8, 9)),
    ):
        yield f"write {name}", copy(place, outside, size, 1)
        yield f"read {name}", copy(outside, place, size, 2)


def _launches(library: Any, function: int, stream: int, outside: int) -> Iterator[tuple[str, int]]:
    memory = c_void_p()
    library.hipMalloc(byref(memory), 2 * SIZE)
    x = memory.value or 0
    params = (ctypes.c_uint64 * 5)(x, x + SIZE, 64, 0x40000000)
    usual: dict[str, Any] = {
        **{"grid": (1, 1, 1), "block": (64, 1, 1), "lds": 0, "stream": None},
        **{"size": 32, "tags": (1, 2, 3), "function": function},
    }
    for change in (
        *({}, {"stream": stream}, {"stream": outside}, {"function": None}, {"block": (32, 1, 1)}),
        *(
            {"grid": (0, 1, 1)},
            {"block": (0, 1, 1)},
            {"grid": (1, 0, 1)},
            {"grid": (1 << 26, 1, 1)},
        ),
        *({"block": (128, 1, 1)}, {"block": (2048, 1, 1)}, {"lds": 16}, {"lds": 1 << 20}),
        *({"size": 8}, {"size": 40}, {"tags": (2, 1, 3)}, {"tags": (1, 2, 0)}),
    ):
        how = {**usual, **change}
        first, second, end = how["tags"]
        size = c_size_t(how["size"])
        extra = (c_void_p * 5)(first, ctypes.addressof(params), second, ctypes.addressof(size), end)
        words = (how["function"], *how["grid"], *how["block"], how["lds"], how["stream"])
        text = ", ".join(f"{name} {value}" for name, value in change.items())
        text = text.replace(str(stream), "of HIP").replace(str(outside), "of nobody")
        yield f"launch {text}".strip(), library.hipModuleLaunchKernel(*words, None, extra)
        yield f"then {text}".strip(), library.hipDeviceSynchronize()


def answers(library: Any, code: bytes, other: bytes) -> tuple[dict[str, int], list[str]]:
    """Ask each question, and the last error after it, twice; give their statuses, and the words of
    STATUSES.
    """
    for name, types in TYPES.items():
        getattr(library, name).argtypes, getattr(library, name).restype = types, c_int
    library.hipGetErrorString.argtypes, library.hipGetErrorString.restype = [c_int], c_char_p
    found = {}
    for name, status in asked(library, code, other):
        found[name] = status
        found[f"last error of {name}"] = library.hipGetLastError()
        found[f"last error, again, of {name}"] = library.hipGetLastError()
    words = [library.hipGetErrorString(status).decode() for status in STATUSES]
    return found, words


if __name__ == "__main__":
    path, *files = sys.argv[1:]
    contents = (Path(each).read_bytes() for each in files)
    print(json.dumps(answers(ctypes.CDLL(path), *contents)))
