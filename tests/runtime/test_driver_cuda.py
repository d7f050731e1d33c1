"""The launcher and the ctypes table of CUDA, against a library that notes what it gets."""

from __future__ import annotations

from typing import Any

import pytest

from lib_rocm_sd import arch
from lib_rocm_sd.errors import DeviceOutOfMemoryError, LaunchError
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import build, cuda, launcher
from lib_rocm_sd.runtime.build import CodeObject
from tests.runtime.code_objects import SCALE
from tests.runtime.driver_doubles import (
    FUNCTION,
    MODULE,
    PARAMS,
    SPEC,
    STREAM,
    Torch,
    cuda_library,
    device,
    fake_torch,
    notes,
)

torch = pytest.importorskip("torch")

__all__ = ["cuda_library", "fake_torch"]


@pytest.fixture
def cuda_launch(
    cuda_library: Any, fake_torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> launcher.Launcher:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    cuda_library.drop_context()
    cuda_library.set_lds_symbol(0)
    notes(cuda_library)
    return launcher.Launcher(cuda.CudaDriver(cuda_library), 0, arch.table()["sm_80"])


def test_cuda_code_is_built_for_the_card_itself(
    cuda_launch: launcher.Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[arch.Arch] = []

    def note(spec: KernelSpec, row: arch.Arch) -> CodeObject:
        asked.append(row)
        return CodeObject(b"cubin", "fake", True, 0.0)

    monkeypatch.setattr(build, "build", note)
    cuda_launch(SPEC, 1, 64, PARAMS, device())
    assert [(row.gfx, row.matrix) for row in asked] == [("sm_90", "mma_sm80")]


def test_cuda_receives_every_argument_in_its_place(
    cuda_library: Any, cuda_launch: launcher.Launcher
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
    cuda_library: Any, cuda_launch: launcher.Launcher
) -> None:
    cuda_launch(SPEC, 1, 64, PARAMS, device())
    assert any(" lds 0 " in line for line in notes(cuda_library))
    cuda_library.set_lds_symbol(1024)
    cuda_launch(KernelSpec(SCALE, "scale", (("THREADS", 256),)), 1, 64, PARAMS, device())
    said = notes(cuda_library)
    assert any(" lds 1024 " in line for line in said)
    assert not any(line.startswith("attribute") for line in said)


def test_a_thread_without_a_context_gets_one(
    cuda_library: Any, cuda_launch: launcher.Launcher
) -> None:
    cuda_launch(SPEC, 1, 64, PARAMS, device())
    cuda_library.drop_context()
    notes(cuda_library)
    cuda_launch(SPEC, 1, 64, PARAMS, device())
    assert [line.split()[0] for line in notes(cuda_library)] == ["retain", "launch", "extra"]


def test_cuda_errors_have_their_text(cuda_library: Any, cuda_launch: launcher.Launcher) -> None:
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
