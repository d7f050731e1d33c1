"""The ctypes table of a card's memory, against a library that looks at what it receives."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from lib_rocm_sd import arch
from lib_rocm_sd.errors import DeviceOutOfMemoryError, LaunchError
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime.card import BareLauncher, HipCard
from tests.verify import hip_library


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hip_library.built(tmp_path_factory.mktemp("hip"))


@pytest.fixture
def library(path: Path) -> Any:
    return hip_library.opened(path)


def test_what_is_written_is_read(library: Any) -> None:
    card = HipCard(library, 0)
    place = card.allocate(1000)
    assert place % 256 == 0
    card.fill(place, 0xA5, 1000)
    card.write(place + 10, b"a\0b")
    assert card.read(place + 9, 5) == b"\xa5a\0b\xa5"
    card.synchronise()
    card.free(place)
    assert card.free_bytes() == 1 << 30
    assert card.new_stream() > 2**32
    assert hip_library.complaints(library) == []


def test_a_card_that_is_not_there(library: Any) -> None:
    with pytest.raises(LaunchError, match="hipSetDevice") as caught:
        HipCard(library, 3)
    assert caught.value.status == 101


def test_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = HipCard(hip_library.opened(hip_library.built(tmp_path)), 0)
    monkeypatch.setenv("ROCM_SD_FAKE_HIP", "oom:1")
    with pytest.raises(DeviceOutOfMemoryError, match="hipMalloc: out of memory"):
        card.allocate(8)
    card.free(card.allocate(8))


def test_the_bare_launcher_asks_nothing_of_torch(library: Any) -> None:
    asked: list[KernelSpec] = []

    def code(spec: KernelSpec) -> bytes:
        asked.append(spec)
        return b"\0" * 64

    row = arch.table()["sm_80"]  # whose code is not looked into
    launch = BareLauncher(HipCard(library, 0).driver, 0, row, code)
    spec = KernelSpec("a.hip", "a")
    params: Any = (ctypes.c_char * 8)()
    where: Any = type("Device", (), {"index": 0})()
    with pytest.raises(LaunchError, match="invalid"):
        launch(spec, 1, 64, params, where)
    assert asked == [spec]
