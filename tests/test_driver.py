"""The launcher and the ctypes tables of HIP and CUDA, against libraries that note what they get."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lib_rocm_sd import arch
from lib_rocm_sd.errors import CompileError, DeviceOutOfMemoryError, LaunchError
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import build, cuda, driver, hip, libraries
from lib_rocm_sd.runtime.build import CodeObject
from tests.code_objects import SCALE, c_library, code_object, kernel_row

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent
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
        driver, "_torch_calls", lambda: (lambda index: fake.stream, lambda: fake.device)
    )
    monkeypatch.setattr(driver, "_on_device", fake.on_device)
    monkeypatch.setattr(driver, "_capturing", lambda: fake.capturing)
    code = code_object(kernels=[kernel_row(kernarg_segment_size=32)])
    monkeypatch.setattr(build, "build", lambda spec, row: CodeObject(code, "fake", True, 0.0))
    return fake


def device(index: int = 0) -> Any:
    return torch.device("cuda", index)


def test_hip_receives_every_argument_in_its_place(hip_library: Any, fake_torch: Torch) -> None:
    launch = driver.Launcher(hip.HipDriver(hip_library), 0, ROW)
    notes(hip_library)
    launch(SPEC, 3_000_000_00 // 64, 64, PARAMS, device())
    assert notes(hip_library) == [
        "load 7f454c46",
        f"function {MODULE:x} scale",
        f"launch {FUNCTION:x} grid 4687500 1 1 block 64 1 1 lds 0 stream {STREAM:x} params (nil)",
        f"extra 1 2 3 size 32:{bytes(PARAMS).hex()}",
    ]


def test_a_kernel_is_loaded_once(hip_library: Any, fake_torch: Torch) -> None:
    launch = driver.Launcher(hip.HipDriver(hip_library), 0, ROW)
    notes(hip_library)
    for _ in range(3):
        launch(SPEC, 1, 64, PARAMS, device())
    kinds = [line.split()[0] for line in notes(hip_library)]
    assert kinds == ["load", "function", *["launch", "extra"] * 3]


def test_a_launch_costs_microseconds(hip_library: Any, fake_torch: Torch) -> None:
    launch = driver.Launcher(hip.HipDriver(hip_library), 0, ROW)
    where = device()
    best = 1.0
    for _ in range(100):
        notes(hip_library)
        start = time.perf_counter()
        for _ in range(10):
            launch(SPEC, 1, 64, PARAMS, where)
        best = min(best, (time.perf_counter() - start) / 10)
    assert best < 40e-6


def test_another_current_device_is_set_and_put_back(hip_library: Any, fake_torch: Torch) -> None:
    launch = driver.Launcher(hip.HipDriver(hip_library), 1, ROW)
    launch(SPEC, 1, 64, PARAMS, device(1))
    assert fake_torch.guards == [1] and fake_torch.device == 0
    fake_torch.device = 1
    launch(SPEC, 1, 64, PARAMS, device(1))
    assert fake_torch.guards == [1]
    with pytest.raises(ValueError, match="device 1 called for cuda:0"):
        launch(SPEC, 1, 64, PARAMS, device(0))


def test_a_failed_launch_says_why_and_clears_the_error(hip_library: Any, fake_torch: Torch) -> None:
    launch = driver.Launcher(hip.HipDriver(hip_library), 0, ROW)
    launch(SPEC, 1, 64, PARAMS, device())
    notes(hip_library)
    hip_library.fail_with(209)
    with pytest.raises(LaunchError, match=r"hipModuleLaunchKernel: no kernel image \(209\)"):
        launch(SPEC, 1, 64, PARAMS, device())
    assert notes(hip_library)[-1] == "cleared"
    launch(SPEC, 1, 64, PARAMS, device())


def test_out_of_memory_is_its_own_error(hip_library: Any, fake_torch: Torch) -> None:
    launch = driver.Launcher(hip.HipDriver(hip_library), 0, ROW)
    hip_library.fail_with(2)
    with pytest.raises(DeviceOutOfMemoryError, match="hipModuleLoadData: out of memory"):
        launch(SPEC, 1, 64, PARAMS, device())
    launch(SPEC, 1, 64, PARAMS, device())  # nothing half-loaded was kept


def test_nothing_to_do_launches_nothing(hip_library: Any, fake_torch: Torch) -> None:
    launch = driver.Launcher(hip.HipDriver(hip_library), 0, ROW)
    notes(hip_library)
    launch(SPEC, 0, 64, PARAMS, device())
    assert notes(hip_library) == []


def test_more_than_one_launch_can_hold(hip_library: Any, fake_torch: Torch) -> None:
    launch = driver.Launcher(hip.HipDriver(hip_library), 0, ROW)
    with pytest.raises(LaunchError, match="do not fit into one launch"):
        launch(SPEC, 2**26, 64, PARAMS, device())


def test_a_parameter_struct_that_is_too_long(hip_library: Any, fake_torch: Torch) -> None:
    class Long(ctypes.Structure):
        _fields_ = [("words", ctypes.c_uint64 * 5)]

    launch = driver.Launcher(hip.HipDriver(hip_library), 0, ROW)
    with pytest.raises(LaunchError, match="takes 32 argument bytes and was given 40"):
        launch(SPEC, 1, 64, Long(), device())


def test_a_capture_uses_loaded_kernels_only(hip_library: Any, fake_torch: Torch) -> None:
    launch = driver.Launcher(hip.HipDriver(hip_library), 0, ROW)
    fake_torch.capturing = True
    with pytest.raises(LaunchError, match="captured"):
        launch(SPEC, 1, 64, PARAMS, device())
    fake_torch.capturing = False
    launch(SPEC, 1, 64, PARAMS, device())
    fake_torch.capturing = True
    launch(SPEC, 1, 64, PARAMS, device())


def test_a_compile_error_reaches_the_caller(
    hip_library: Any, fake_torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(spec: KernelSpec, row: arch.Arch) -> CodeObject:
        raise CompileError("cc", "no")

    monkeypatch.setattr(build, "build", fail)
    with pytest.raises(CompileError):
        driver.Launcher(hip.HipDriver(hip_library), 0, ROW)(SPEC, 1, 64, PARAMS, device())


def test_where_streams_mean_nothing_only_the_default_one_is_used(
    hip_library: Any, fake_torch: Torch
) -> None:
    launch = driver.Launcher(hip.HipDriver(hip_library, default_stream_only=True), 0, ROW)
    with pytest.raises(LaunchError, match="default stream"):
        launch(SPEC, 1, 64, PARAMS, device())
    fake_torch.stream = 0
    launch(SPEC, 1, 64, PARAMS, device())
    assert any("stream 0 " in line for line in notes(hip_library))


def repeated(launch: driver.Launcher, params: Any = PARAMS, grid: int = 3) -> Any:
    return launch.prepare(SPEC, grid, 64, params, device(launch._index))


def test_a_prepared_launch_is_the_launch(hip_library: Any, fake_torch: Torch) -> None:
    launch = driver.Launcher(hip.HipDriver(hip_library), 0, ROW)
    params = ScaleParams.from_buffer_copy(PARAMS)
    start = repeated(launch, params)
    notes(hip_library)
    launch(SPEC, 3, 64, params, device())
    said = notes(hip_library)
    for x in (params.x, 7):
        params.x = x
        gc.collect()
        start()
        again = notes(hip_library)
        assert again[0] == said[0] and f"size 32:{bytes(params).hex()}" in again[1]
    fake_torch.stream = 0x77
    start()
    assert " stream 77 " in notes(hip_library)[0]
    assert len(said) == len(again) == 2


def test_a_prepared_launch_keeps_its_arguments(hip_library: Any, fake_torch: Torch) -> None:
    start = repeated(
        driver.Launcher(hip.HipDriver(hip_library), 0, ROW), ScaleParams.from_buffer_copy(PARAMS)
    )
    gc.collect()
    others = [ScaleParams() for _ in range(100)]
    notes(hip_library)
    start()
    assert notes(hip_library)[1].endswith(bytes(PARAMS).hex()) and len(others) == 100


def test_preparing_checks_what_a_launch_checks(hip_library: Any, fake_torch: Torch) -> None:
    launch = driver.Launcher(hip.HipDriver(hip_library), 0, ROW)
    with pytest.raises(ValueError, match="device 0 called for cuda:1"):
        launch.prepare(SPEC, 1, 64, PARAMS, device(1))
    with pytest.raises(LaunchError, match="do not fit into one launch"):
        repeated(launch, grid=2**26)
    fake_torch.capturing = True
    with pytest.raises(LaunchError, match="captured"):
        repeated(launch)
    fake_torch.capturing = False
    notes(hip_library)
    repeated(launch, grid=0)()
    assert notes(hip_library) == []
    hip_library.fail_with(209)
    with pytest.raises(LaunchError, match="hipModuleLoadData"):
        repeated(launch)


def test_a_prepared_launch_minds_device_stream_and_errors(
    hip_library: Any, fake_torch: Torch
) -> None:
    start = repeated(driver.Launcher(hip.HipDriver(hip_library), 1, ROW))
    assert fake_torch.guards == [1]
    start()
    assert fake_torch.guards == [1, 1] and fake_torch.device == 0
    fake_torch.device = 1
    start()
    assert fake_torch.guards == [1, 1]
    hip_library.fail_with(2)
    with pytest.raises(DeviceOutOfMemoryError):
        start()
    start()
    only = hip.HipDriver(hip_library, default_stream_only=True)
    start = repeated(driver.Launcher(only, 1, ROW))
    with pytest.raises(LaunchError, match="default stream"):
        start()


def test_a_driver_of_another_kind_can_be_prepared_too(
    hip_library: Any, fake_torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hip.HipDriver, "prepared", driver.Driver.prepared)
    begun: list[tuple[Any, ...]] = []
    monkeypatch.setattr(hip.HipDriver, "launch", lambda self, *words: begun.append(words))
    repeated(driver.Launcher(hip.HipDriver(hip_library), 0, ROW))()
    assert begun == [(FUNCTION, 3, 64, 0, STREAM, PARAMS)]


# -- CUDA


@pytest.fixture
def cuda_launch(
    cuda_library: Any, fake_torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> driver.Launcher:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    cuda_library.drop_context()
    cuda_library.set_lds_symbol(0)
    notes(cuda_library)
    return driver.Launcher(cuda.CudaDriver(cuda_library), 0, arch.table()["sm_80"])


def test_cuda_code_is_built_for_the_card_itself(
    cuda_launch: driver.Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[arch.Arch] = []

    def note(spec: KernelSpec, row: arch.Arch) -> CodeObject:
        asked.append(row)
        return CodeObject(b"cubin", "fake", True, 0.0)

    monkeypatch.setattr(build, "build", note)
    cuda_launch(SPEC, 1, 64, PARAMS, device())
    assert [(row.gfx, row.matrix) for row in asked] == [("sm_90", "mma_sm80")]


def test_cuda_receives_every_argument_in_its_place(
    cuda_library: Any, cuda_launch: driver.Launcher
) -> None:
    cuda_library.set_lds_symbol(65536)
    cuda_launch(SPEC, 7, 128, PARAMS, device())
    assert notes(cuda_library) == [
        "retain 40",
        f"global {MODULE:x} rocm_sd_lds_bytes",
        f"attribute {FUNCTION:x} 8 65536",
        f"launch {FUNCTION:x} grid 7 1 1 block 128 1 1 lds 65536 stream {STREAM:x} params (nil)",
        f"extra 1 2 0 size 32:{bytes(PARAMS).hex()}",
    ]


def test_a_kernel_without_lds_and_one_with_little(
    cuda_library: Any, cuda_launch: driver.Launcher
) -> None:
    cuda_launch(SPEC, 1, 64, PARAMS, device())
    assert any(" lds 0 " in line for line in notes(cuda_library))
    cuda_library.set_lds_symbol(1024)
    cuda_launch(KernelSpec(SCALE, "scale", (("THREADS", 256),)), 1, 64, PARAMS, device())
    said = notes(cuda_library)
    assert any(" lds 1024 " in line for line in said)
    assert not any(line.startswith("attribute") for line in said)


def test_a_thread_without_a_context_gets_one(
    cuda_library: Any, cuda_launch: driver.Launcher
) -> None:
    cuda_launch(SPEC, 1, 64, PARAMS, device())
    cuda_library.drop_context()
    notes(cuda_library)
    cuda_launch(SPEC, 1, 64, PARAMS, device())
    assert [line.split()[0] for line in notes(cuda_library)] == ["retain", "launch", "extra"]


def test_cuda_errors_have_their_text(cuda_library: Any, cuda_launch: driver.Launcher) -> None:
    cuda_launch(SPEC, 1, 64, PARAMS, device())
    cuda_library.fail_with(700)
    with pytest.raises(LaunchError, match=r"cuLaunchKernel: cuda says no \(700\)"):
        cuda_launch(SPEC, 1, 64, PARAMS, device())
    cuda_library.fail_with(2)
    with pytest.raises(DeviceOutOfMemoryError):
        cuda_launch(SPEC, 1, 64, PARAMS, device())


def test_cuda_needs_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROCM_SD_ALLOW_CUDA", raising=False)
    with pytest.raises(LaunchError, match="ROCM_SD_ALLOW_CUDA"):
        cuda.library()


# -- which library


def test_the_library_that_the_process_has_loaded_is_found(tmp_path: Path) -> None:
    """In a process of its own, since a library stays loaded; the same handle is the same copy."""
    mine = c_library(HIP, tmp_path / "mine" / "libamdhip64.so.6")
    c_library(HIP, tmp_path / "other" / "libamdhip64.so.7")
    script = f"""
import ctypes
from pathlib import Path
from lib_rocm_sd.runtime import hip, libraries
libraries.rocm_library_folders = lambda: [Path({str(tmp_path / "other")!r})]
mine = ctypes.CDLL({str(mine)!r})
assert hip.library()._handle == mine._handle
print(sum("libamdhip64" in str(path) for path in hip.loaded_libraries()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_torchs_own_is_taken_of_two(tmp_path: Path) -> None:
    beside = c_library(HIP, tmp_path / "rocm" / "libamdhip64.so.7")
    own = c_library(HIP, tmp_path / "torch" / "lib" / "libamdhip64.so")
    script = f"""
import ctypes
from pathlib import Path
from lib_rocm_sd.runtime import hip, libraries
libraries.package_folder = lambda name: Path({str(tmp_path / "torch")!r})
ctypes.CDLL({str(beside)!r})
own = ctypes.CDLL({str(own)!r})
assert hip.library()._handle == own._handle
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""


def test_a_device_of_another_type_is_a_launch_error() -> None:
    with pytest.raises(LaunchError, match="cpu is no GPU"):
        driver.launcher_for(torch.device("cpu"), ROW)


def test_no_hip_runtime_is_a_launch_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hip, "loaded_libraries", lambda: iter(()))
    monkeypatch.setattr(libraries, "rocm_library_folders", lambda: [tmp_path])
    with pytest.raises(LaunchError, match="no HIP runtime"):
        hip.library()
    (tmp_path / "libamdhip64.so").write_bytes(b"not a library")
    with pytest.raises(LaunchError, match=r"libamdhip64\.so"):
        hip.library()


def test_a_library_of_a_similar_name_is_not_taken() -> None:
    names = {
        "libamdhip64.so": True,
        "libamdhip64.so.6.2.41133": True,
        "amdhip64_7.dll": True,
        "amdhip64.dll": True,
        "libamdhip64_extra.so": False,
        "libhiprtc.so.7": False,
    }
    assert {name: bool(hip._NAME.search(name)) for name in names} == names


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="/proc is Linux's")  # noqa: PTH110
def test_loaded_libraries_has_torchs() -> None:
    assert any(path.name.startswith("libtorch_cpu") for path in hip.loaded_libraries())


@pytest.mark.parametrize(
    ("version", "name", "wanted"),
    [
        ("6.2", "AMD Radeon", "hip"),
        (None, "AMD Radeon RX 7900 [ZLUDA]", "zluda"),
        (None, "H", "cuda"),
    ],
)
def test_the_driver_follows_torch(
    monkeypatch: pytest.MonkeyPatch,
    hip_library: Any,
    cuda_library: Any,
    version: str | None,
    name: str,
    wanted: str,
) -> None:
    monkeypatch.setattr(torch.version, "hip", version)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    monkeypatch.setattr(hip, "library", lambda: hip_library)
    monkeypatch.setattr(cuda, "library", lambda: cuda_library)
    found = driver._driver_for(0)
    assert isinstance(found, cuda.CudaDriver) == (wanted == "cuda")
    assert found.default_stream_only == (wanted == "zluda")


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 63, 64, 1000])
def test_a_real_launch(count: int) -> None:
    from lib_rocm_sd import device as devices

    where = torch.device("cuda", torch.cuda.current_device())
    row = devices.identify(where).arch
    assert row is not None
    x = torch.randn(count, device=where)
    out = torch.zeros(count, device=where)
    params = ScaleParams(x.data_ptr(), out.data_ptr(), count, 1.5)
    driver.launcher_for(where, row)(SPEC, -(-count // 64), 64, params, where)
    padded = torch.cat([x, torch.zeros(64 - count % 64, device=where)])
    neighbours = padded.view(-1, 2).flip(1).reshape(-1)[:count]
    assert torch.allclose(out, 1.5 * x + neighbours, rtol=1e-6, atol=1e-6)
