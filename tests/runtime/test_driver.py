"""The launcher and the ctypes table of HIP, against a library that notes what it gets."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest

from lib_rocm_sd import arch
from lib_rocm_sd.errors import CompileError, DeviceOutOfMemoryError, LaunchError
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import build, hip, launcher
from lib_rocm_sd.runtime.build import CodeObject
from tests.calls import calls_of
from tests.runtime.driver_doubles import (
    FUNCTION,
    MODULE,
    PARAMS,
    ROW,
    SPEC,
    STREAM,
    ScaleParams,
    Torch,
    device,
    fake_torch,
    hip_library,
    notes,
)

torch = pytest.importorskip("torch")

__all__ = ["fake_torch", "hip_library"]


def test_hip_receives_every_argument_in_its_place(hip_library: Any, fake_torch: Torch) -> None:
    launch = launcher.Launcher(hip.HipDriver(hip_library), 0, ROW)
    notes(hip_library)
    launch(SPEC, 3_000_000_00 // 64, 64, PARAMS, device())
    assert notes(hip_library) == [
        "load 7f454c46",
        f"function {MODULE:x} scale",
        f"launch {FUNCTION:x} grid 4687500 1 1 block 64 1 1 lds 0 stream {STREAM:x} params (nil)",
        f"extra 1 2 3 size 32:{bytes(PARAMS).hex()}",
    ]


def test_a_kernel_is_loaded_once(hip_library: Any, fake_torch: Torch) -> None:
    launch = launcher.Launcher(hip.HipDriver(hip_library), 0, ROW)
    notes(hip_library)
    for _ in range(3):
        launch(SPEC, 1, 64, PARAMS, device())
    kinds = [line.split()[0] for line in notes(hip_library)]
    assert kinds == ["load", "function", *["launch", "extra"] * 3]


def test_a_launch_costs_few_calls(hip_library: Any, fake_torch: Torch) -> None:
    launch = launcher.Launcher(hip.HipDriver(hip_library), 0, ROW)
    where = device()
    launch(SPEC, 1, 64, PARAMS, where)
    assert calls_of(lambda: launch(SPEC, 1, 64, PARAMS, where)) <= 20


def test_another_current_device_is_set_and_put_back(hip_library: Any, fake_torch: Torch) -> None:
    launch = launcher.Launcher(hip.HipDriver(hip_library), 1, ROW)
    launch(SPEC, 1, 64, PARAMS, device(1))
    assert fake_torch.guards == [1] and fake_torch.device == 0
    fake_torch.device = 1
    launch(SPEC, 1, 64, PARAMS, device(1))
    assert fake_torch.guards == [1]
    with pytest.raises(ValueError, match="device 1 called for cuda:0"):
        launch(SPEC, 1, 64, PARAMS, device(0))


def test_a_failed_launch_says_why_and_clears_the_error(hip_library: Any, fake_torch: Torch) -> None:
    launch = launcher.Launcher(hip.HipDriver(hip_library), 0, ROW)
    launch(SPEC, 1, 64, PARAMS, device())
    notes(hip_library)
    hip_library.fail_with(209)
    with pytest.raises(LaunchError, match=r"hipModuleLaunchKernel: no kernel image \(209\)"):
        launch(SPEC, 1, 64, PARAMS, device())
    assert notes(hip_library)[-1] == "cleared"
    launch(SPEC, 1, 64, PARAMS, device())


def test_out_of_memory_is_its_own_error(hip_library: Any, fake_torch: Torch) -> None:
    launch = launcher.Launcher(hip.HipDriver(hip_library), 0, ROW)
    hip_library.fail_with(2)
    with pytest.raises(DeviceOutOfMemoryError, match="hipModuleLoadData: out of memory"):
        launch(SPEC, 1, 64, PARAMS, device())
    launch(SPEC, 1, 64, PARAMS, device())  # nothing half-loaded was kept


def test_nothing_to_do_launches_nothing(hip_library: Any, fake_torch: Torch) -> None:
    launch = launcher.Launcher(hip.HipDriver(hip_library), 0, ROW)
    notes(hip_library)
    launch(SPEC, 0, 64, PARAMS, device())
    assert notes(hip_library) == []


def test_more_than_one_launch_can_hold(hip_library: Any, fake_torch: Torch) -> None:
    launch = launcher.Launcher(hip.HipDriver(hip_library), 0, ROW)
    with pytest.raises(LaunchError, match="do not fit into one launch"):
        launch(SPEC, 2**26, 64, PARAMS, device())


def test_a_parameter_struct_that_is_too_long(hip_library: Any, fake_torch: Torch) -> None:
    class Long(ctypes.Structure):
        _fields_ = [("words", ctypes.c_uint64 * 5)]

    launch = launcher.Launcher(hip.HipDriver(hip_library), 0, ROW)
    with pytest.raises(LaunchError, match="takes 32 argument bytes and was given 40"):
        launch(SPEC, 1, 64, Long(), device())


def test_a_capture_uses_loaded_kernels_only(hip_library: Any, fake_torch: Torch) -> None:
    launch = launcher.Launcher(hip.HipDriver(hip_library), 0, ROW)
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
        launcher.Launcher(hip.HipDriver(hip_library), 0, ROW)(SPEC, 1, 64, PARAMS, device())


def only_default(handle: int) -> int:
    raise LaunchError(f"only the default stream, not {handle:#x}")


def test_streams_are_translated(hip_library: Any, fake_torch: Torch) -> None:
    driver = hip.HipDriver(hip_library, lambda handle: handle + 1)
    fake_torch.stream = 0x10
    launch = launcher.Launcher(driver, 0, ROW)
    launch(SPEC, 1, 64, PARAMS, device())
    launch.prepare(SPEC, 1, 64, PARAMS, device())()
    assert sum("stream 11 " in line for line in notes(hip_library)) == 2


def test_where_streams_mean_nothing_only_the_default_one_is_used(
    hip_library: Any, fake_torch: Torch
) -> None:
    launch = launcher.Launcher(hip.HipDriver(hip_library, only_default), 0, ROW)
    with pytest.raises(LaunchError, match="default stream"):
        launch(SPEC, 1, 64, PARAMS, device())
    fake_torch.stream = 0
    launch(SPEC, 1, 64, PARAMS, device())
    assert any("stream 0 " in line for line in notes(hip_library))


def repeated(launch: launcher.Launcher, params: Any = PARAMS, grid: int = 3) -> Any:
    return launch.prepare(SPEC, grid, 64, params, device(launch._index))


def test_a_prepared_launch_is_the_launch(hip_library: Any, fake_torch: Torch) -> None:
    launch = launcher.Launcher(hip.HipDriver(hip_library), 0, ROW)
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
        launcher.Launcher(hip.HipDriver(hip_library), 0, ROW), ScaleParams.from_buffer_copy(PARAMS)
    )
    gc.collect()
    others = [ScaleParams() for _ in range(100)]
    notes(hip_library)
    start()
    assert notes(hip_library)[1].endswith(bytes(PARAMS).hex()) and len(others) == 100


def test_preparing_checks_what_a_launch_checks(hip_library: Any, fake_torch: Torch) -> None:
    launch = launcher.Launcher(hip.HipDriver(hip_library), 0, ROW)
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
    start = repeated(launcher.Launcher(hip.HipDriver(hip_library), 1, ROW))
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
    only = hip.HipDriver(hip_library, only_default)
    start = repeated(launcher.Launcher(only, 1, ROW))
    with pytest.raises(LaunchError, match="default stream"):
        start()


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
    launcher.launcher_for(where, row)(SPEC, -(-count // 64), 64, params, where)
    padded = torch.cat([x, torch.zeros(64 - count % 64, device=where)])
    neighbours = padded.view(-1, 2).flip(1).reshape(-1)[:count]
    assert torch.allclose(out, 1.5 * x + neighbours, rtol=1e-6, atol=1e-6)
