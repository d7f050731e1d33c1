"""The ctypes table of HIP against a C library that looks at every argument as it receives it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lib_rocm_sd import arch
from lib_rocm_sd.errors import CompileError, DeviceOutOfMemoryError, LaunchError
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import build, driver, hip, launcher
from tests.runtime.code_objects import SCALE
from tests.runtime.driver_doubles import ScaleParams
from tests.verify import hip_library

torch = pytest.importorskip("torch")

ROW = arch.table()["gfx1100"]
SPEC = KernelSpec(SCALE, "scale", (("THREADS", 64),))
PARAMS = ScaleParams(0x0123_4567_89AB_CDEF, 0xFEDC_BA98_7654_3210, -5, 1.5)
CALLS = ("hipModuleLoadData", "hipModuleGetFunction", "hipModuleLaunchKernel")
STATUSES = {
    1: "invalid argument",
    9: "invalid configuration argument",
    98: "invalid device function",
    100: "no ROCm-capable device is detected",
    101: "invalid device ordinal",
    200: "device kernel image is invalid",
    209: "no kernel image is available for execution on the device",
    218: "invalid kernel file",
    303: "shared object initialization failed",
    400: "invalid resource handle",
    500: "named symbol not found",
    700: "an illegal memory access was encountered",
    701: "too many resources requested for launch",
    719: "unspecified launch failure",
    12345: "unknown error",
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hip_library.built(tmp_path_factory.mktemp("hip"))


@pytest.fixture(scope="module")
def code() -> bytes:
    """A kernel that a real compiler made for gfx1100."""
    try:
        return build.build(SPEC, ROW).code
    except CompileError as error:
        pytest.skip(f"needs a compiler for gfx1100: {error}")


@pytest.fixture
def library(path: Path) -> Iterator[Any]:
    """Nothing that the library complained of is left when a test ends."""
    library = hip_library.opened(path)
    library.test_set_machine(hip_library.MACHINES["gfx1100"])
    hip_library.notes(library), hip_library.complaints(library)
    library.hipGetLastError()
    yield library
    assert hip_library.complaints(library) == []
    library.test_set_machine(0)


@pytest.fixture
def stream(library: Any) -> int:
    return int(library.test_stream())


@pytest.fixture
def launch(library: Any, stream: int, monkeypatch: pytest.MonkeyPatch) -> launcher.Launcher:
    """The project's launcher on that library, with `stream` as torch's current one."""
    monkeypatch.setattr(launcher, "_torch_calls", lambda: (lambda index: stream, lambda: 0))
    monkeypatch.setattr(launcher, "_capturing", lambda: False)
    return launcher.Launcher(hip.HipDriver(library), 0, ROW)


def run(launch: launcher.Launcher, grid: int = 3) -> None:
    launch(SPEC, grid, 64, PARAMS, torch.device("cuda", 0))


def test_load_function_launch(library: Any, launch: launcher.Launcher, code: bytes) -> None:
    seen: list[tuple[Any, ...]] = []

    def execute(image: int, size: int, entry: bytes, *rest: Any) -> int:
        grid, block, arguments, count, stream = rest
        given = ctypes.string_at(arguments, count)
        seen.append((ctypes.string_at(image, size), entry, grid, block, given, stream))
        return 0

    kept = hip_library.set_executor(library, execute)
    run(launch, 67_000_000)
    run(launch, 1)
    hip_library.set_executor(library, None)
    del kept
    number = seen[0][-1]
    assert number > 0
    assert [item[1:] for item in seen] == [
        (b"scale", 67_000_000, 64, bytes(PARAMS), number),
        (b"scale", 1, 64, bytes(PARAMS), number),
    ]
    assert all(code.startswith(item[0]) and len(item[0]) > 1000 for item in seen)
    assert hip_library.notes(library) == [
        f"hipModuleLoadData image of {len(seen[0][0])} bytes for 41",
        "hipModuleGetFunction scale takes 32 bytes",
        f"hipModuleLaunchKernel scale grid 67000000 block 64 stream {number} bytes 32",
        f"hipModuleLaunchKernel scale grid 1 block 64 stream {number} bytes 32",
    ]


def test_the_default_stream_is_null(
    library: Any, code: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_torch_calls", lambda: (lambda index: 0, lambda: 0))
    monkeypatch.setattr(launcher, "_capturing", lambda: False)
    run(launcher.Launcher(hip.HipDriver(library, lambda handle: handle // 0), 0, ROW))
    assert " stream 0 " in hip_library.notes(library)[-1]


def test_a_stream_of_another_runtime_is_refused(
    library: Any, code: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = ctypes.create_string_buffer(64)
    monkeypatch.setattr(
        launcher, "_torch_calls", lambda: (lambda index: ctypes.addressof(foreign), lambda: 0)
    )
    monkeypatch.setattr(launcher, "_capturing", lambda: False)
    with pytest.raises(LaunchError, match=r"invalid argument \(1\)"):
        run(launcher.Launcher(hip.HipDriver(library), 0, ROW))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("status", STATUSES)
def test_every_error_has_its_text_and_is_cleared(
    library: Any, launch: launcher.Launcher, code: bytes, call: str, status: int
) -> None:
    hip_library.fail(library, call, status)
    with pytest.raises(LaunchError) as caught:
        run(launch)
    assert not isinstance(caught.value, DeviceOutOfMemoryError)
    assert str(caught.value) == f"{call}: {STATUSES[status]} ({status})"
    assert library.test_last_error() == 0
    run(launch)  # nothing half-made was kept


@pytest.mark.parametrize("call", CALLS)
def test_out_of_memory(library: Any, launch: launcher.Launcher, code: bytes, call: str) -> None:
    hip_library.fail(library, call, 2)
    with pytest.raises(DeviceOutOfMemoryError, match=rf"{call}: out of memory \(2\)"):
        run(launch)
    assert library.test_last_error() == 0
    run(launch)


def test_code_for_another_card(library: Any, launch: launcher.Launcher, code: bytes) -> None:
    library.test_set_machine(hip_library.MACHINES["gfx1201"])
    with pytest.raises(LaunchError, match=r"shared object initialization failed \(303\)"):
        run(launch)


def test_what_is_no_code_object(library: Any) -> None:
    with pytest.raises(LaunchError, match=r"invalid kernel file \(218\)"):
        hip.HipDriver(library).load(b"\0" * 64)


def test_a_kernel_that_is_not_in_the_module(library: Any, code: bytes) -> None:
    made = hip.HipDriver(library)
    module = made.load(code)
    assert module > 2**32
    with pytest.raises(LaunchError, match=r"named symbol not found \(500\)"):
        made.function(module, "other")


def test_the_code_is_kept_as_long_as_the_kernel(
    library: Any, launch: launcher.Launcher, monkeypatch: pytest.MonkeyPatch, code: bytes
) -> None:
    """The library refers to the image: were it freed or moved, its sum would not be the same."""
    only = bytearray(code)
    monkeypatch.setattr(
        build, "build", lambda spec, row: build.CodeObject(bytes(only), "fake", True, 0.0)
    )
    run(launch)
    gc.collect()
    overwriting = [bytes([value]) * len(code) for value in range(64)]
    run(launch)
    assert len(overwriting) == 64


# -- the library itself: a table with a mistake in it does not pass


def loaded(library: Any, code: bytes) -> tuple[hip.HipDriver, int]:
    made = hip.HipDriver(library)
    return made, made.function(made.load(code), "scale")


def test_a_handle_cut_to_32_bits_is_seen(
    library: Any, code: bytes, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, function = loaded(library, code)
    made.launch(function, 1, 64, 0, stream, PARAMS)

    whole = driver.launch_sizes

    def cut(handle: int, *sizes: int) -> Any:
        return whole(ctypes.c_uint(handle).value, *sizes)

    monkeypatch.setattr(driver, "launch_sizes", cut)
    with pytest.raises(LaunchError, match="invalid resource handle"):
        made.launch(function, 1, 64, 0, stream, PARAMS)


def test_lds_that_nobody_asked_for_is_seen(library: Any, code: bytes) -> None:
    made, function = loaded(library, code)
    with pytest.raises(LaunchError):
        made.launch(function, 1, 64, 16, 0, PARAMS)
    assert hip_library.complaints(library) == ["16 bytes of LDS beyond the kernel's own"]


@pytest.mark.parametrize(
    ("tags", "said"), [((2, 1, 3), "extra is 0x2 . 0x1 . 0x3"), ((1, 2, 0), "extra is 0x1")]
)
def test_tags_in_another_order_are_seen(
    library: Any, code: bytes, monkeypatch: pytest.MonkeyPatch, tags: tuple[int, ...], said: str
) -> None:
    made, function = loaded(library, code)
    for name, value in zip(("_BUFFER_POINTER", "_BUFFER_SIZE"), tags, strict=False):
        monkeypatch.setattr(driver, name, value)
    monkeypatch.setattr(hip.HipDriver, "_end", tags[2])
    with pytest.raises(LaunchError):
        made.launch(function, 1, 64, 0, 0, PARAMS)
    (line,) = hip_library.complaints(library)
    assert line.startswith(said)


def test_arguments_in_another_order_are_seen(library: Any, code: bytes) -> None:
    made, function = loaded(library, code)
    extra, (*_, size) = driver.packed(PARAMS, 1, 2, 3)
    call = library.hipModuleLaunchKernel
    assert call(function, 64, 1, 1, 1, 1, 1, 0, None, None, extra) == 0  # grid for block: legal
    assert call(function, 1, 64, 1, 1, 64, 1, 0, None, None, extra) == 1
    assert call(function, 1, 1, 1, 64, 1, 1, 0, None, extra, None) == 1
    assert call(function, 1, 1, 1, 2048, 1, 1, 0, None, None, extra) == 1
    assert len(hip_library.complaints(library)) == 3
    assert size.value == 32
    assert library.hipGetLastError() == 1


def test_a_struct_of_another_size_is_seen(library: Any, code: bytes) -> None:
    class Short(ctypes.Structure):
        _fields_ = [("x", ctypes.c_uint64)]

    made, function = loaded(library, code)
    with pytest.raises(LaunchError, match="invalid argument"):
        made.launch(function, 1, 64, 0, 0, Short(1))
    assert hip_library.complaints(library) == ["scale takes 32 bytes, given 8"]
