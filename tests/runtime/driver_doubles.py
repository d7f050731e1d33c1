"""Stand-ins for HIP's and CUDA's libraries, which note what they get, and for torch's streams."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lib_rocm_sd import arch
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import build, launcher
from lib_rocm_sd.runtime.build import CodeObject
from tests.runtime.code_objects import SCALE, c_library, code_object, kernel_row

torch = pytest.importorskip("torch")

ROW = arch.table()["gfx1100"]
SPEC = KernelSpec(SCALE, "scale", (("THREADS", 64),))
STREAM, MODULE, FUNCTION = 0x7FFF_1234_5678_9ABC, 0x1111_2222_3333_4444, 0x5555_6666_7777_8888


class ScaleParams(ctypes.Structure):
    """As in scale.hip: 28 bytes of fields, 32 with padding."""

    _fields_ = [
        ("x", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("count", ctypes.c_int64),
        ("a", ctypes.c_float),
    ]


PARAMS = ScaleParams(0x0123_4567_89AB_CDEF, 0xFEDC_BA98_7654_3210, -5, 1.5)

NOTES = r"""
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
static char notes[65536];
static int fail_status;
const char *take_notes(void) { static char out[65536]; strcpy(out, notes); *notes = 0; return out; }
void fail_with(int status) { fail_status = status; }
static int result(void) { int status = fail_status; fail_status = 0; return status; }
#define NOTE(...) sprintf(notes + strlen(notes), __VA_ARGS__)
static void note_launch(uint64_t f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned lds, uint64_t stream, void **params, void **extra) {
    NOTE("launch %llx grid %u %u %u block %u %u %u lds %u stream %llx params %p\n",
         (unsigned long long)f, gx, gy, gz, bx, by, bz, lds, (unsigned long long)stream,
         (void *)params);
    const unsigned char *bytes = extra[1];
    size_t size = *(size_t *)extra[3];
    NOTE("extra %zu %zu %zu size %zu:", (size_t)extra[0], (size_t)extra[2], (size_t)extra[4], size);
    for (size_t i = 0; i < size; i++) NOTE("%02x", bytes[i]);
    NOTE("\n");
}
"""

HIP = (
    NOTES
    + r"""
int hipModuleLoadData(uint64_t *module, const unsigned char *image) {
    NOTE("load %02x%02x%02x%02x\n", image[0], image[1], image[2], image[3]);
    *module = 0x1111222233334444ull;
    return result();
}
int hipModuleGetFunction(uint64_t *function, uint64_t module, const char *name) {
    NOTE("function %llx %s\n", (unsigned long long)module, name);
    *function = 0x5555666677778888ull;
    return result();
}
int hipModuleLaunchKernel(uint64_t f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                          unsigned by, unsigned bz, unsigned lds, uint64_t stream, void **params,
                          void **extra) {
    note_launch(f, gx, gy, gz, bx, by, bz, lds, stream, params, extra);
    return result();
}
int hipGetLastError(void) { NOTE("cleared\n"); return 0; }
const char *hipGetErrorString(int status) {
    return status == 2 ? "out of memory" : status == 209 ? "no kernel image" : "unknown";
}
"""
)

CUDA = (
    NOTES
    + r"""
static int have_context;
static unsigned lds_symbol;
void set_lds_symbol(unsigned bytes) { lds_symbol = bytes; }
void drop_context(void) { have_context = 0; }
int cuModuleLoadData(uint64_t *module, const char *image) {
    *module = 0x1111222233334444ull;
    return have_context ? result() : 201;
}
int cuModuleGetFunction(uint64_t *function, uint64_t module, const char *name) {
    *function = 0x5555666677778888ull;
    return result();
}
int cuModuleGetGlobal_v2(uint64_t *address, size_t *size, uint64_t module, const char *name) {
    NOTE("global %llx %s\n", (unsigned long long)module, name);
    *address = (uint64_t)(uintptr_t)&lds_symbol, *size = 4;
    return lds_symbol ? result() : 500;
}
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
    memcpy(to, (void *)(uintptr_t)from, size);
    return 0;
}
int cuFuncSetAttribute(uint64_t function, int attribute, int value) {
    NOTE("attribute %llx %d %d\n", (unsigned long long)function, attribute, value);
    return 0;
}
int cuLaunchKernel(uint64_t f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned lds, uint64_t stream, void **params, void **extra) {
    if (!have_context) return 201;
    note_launch(f, gx, gy, gz, bx, by, bz, lds, stream, params, extra);
    return result();
}
int cuGetErrorString(int status, const char **text) { *text = "cuda says no"; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return have_context ? 0 : 201; }
int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return 0; }
int cuDevicePrimaryCtxRetain(uint64_t *context, int device) {
    NOTE("retain %d\n", device);
    *context = 0x9999aaaabbbbccccull;
    return 0;
}
int cuCtxSetCurrent(uint64_t context) { have_context = context == 0x9999aaaabbbbccccull; return 0; }
"""
)


def loaded(source: str, path: Path) -> Any:
    """The library made of `source`, with its own test functions typed."""
    library = ctypes.CDLL(str(c_library(source, path)))
    library.take_notes.restype = ctypes.c_char_p
    return library


def notes(library: Any) -> list[str]:
    """What the library has noted since the last time."""
    return list(library.take_notes().decode().splitlines())


@pytest.fixture(scope="module")
def hip_library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return loaded(HIP, tmp_path_factory.mktemp("hip") / "libfakehip.so")


@pytest.fixture(scope="module")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return loaded(CUDA, tmp_path_factory.mktemp("cuda") / "libfakecuda.so")


class Torch:
    """What the launcher asks torch: current stream and device, and whether one is captured."""

    def __init__(self) -> None:
        self.stream, self.device, self.capturing = STREAM, 0, False
        self.guards: list[int] = []

    def on_device(self, index: int) -> Any:
        """As torch.cuda.device."""
        from contextlib import contextmanager

        @contextmanager
        def guard() -> Iterator[None]:
            before, self.device = self.device, index
            self.guards.append(index)
            yield
            self.device = before

        return guard()


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    fake = Torch()
    monkeypatch.setattr(
        launcher, "_torch_calls", lambda: (lambda index: fake.stream, lambda: fake.device)
    )
    monkeypatch.setattr(launcher, "_on_device", fake.on_device)
    monkeypatch.setattr(launcher, "_capturing", lambda: fake.capturing)
    code = code_object(kernels=[kernel_row(kernarg_segment_size=32)])
    monkeypatch.setattr(build, "build", lambda spec, row: CodeObject(code, "fake", True, 0.0))
    return fake


def device(index: int = 0) -> Any:
    return torch.device("cuda", index)
