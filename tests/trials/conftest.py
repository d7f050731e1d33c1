"""The stand-in HIP library, and the toy kernel's machine code."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lib_rocm_sd import arch, cache
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import build
from lib_rocm_sd.trials.conductor import Conductor
from tests.runtime.code_objects import SCALE
from tests.verify import hip_library
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from tests.trials.world import World


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child has its time on a busy machine, where a test does not say how long."""
    patient = partialmethod(Conductor.__init__, class_limit_s=WAIT_S, start_limit_s=WAIT_S)
    monkeypatch.setattr(Conductor, "__init__", patient)


@pytest.fixture(scope="session")
def hip_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hip_library.built(tmp_path_factory.mktemp("hip"))


@pytest.fixture(scope="session")
def scale_code() -> build.CodeObject:
    """A kernel that a real compiler made for gfx1100."""
    try:
        row = arch.table()["gfx1100"]
        return build.build(KernelSpec(SCALE, "scale", (("THREADS", 64),)), row)
    except CompileError as error:
        pytest.skip(f"needs a compiler for gfx1100: {error}")


@pytest.fixture
def ready(
    fresh_cache: Path,
    scale_code: build.CodeObject,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Path]:
    """A cache of its own in which nothing has a verdict, and the kernel is compiled."""
    monkeypatch.setenv("ROCM_SD_FAKE_HIP", "right:0")
    monkeypatch.setattr(build, "cached", lambda spec, row: scale_code)
    monkeypatch.setattr(build, "build", lambda spec, row: scale_code)
    cache.reset()
    yield fresh_cache


@pytest.fixture
def world(ready: Path, hip_file: Path, tmp_path: Path) -> Iterator[World]:
    pytest.importorskip("torch")
    from tests.trials import scaling
    from tests.trials.world import World

    made = World(scaling.place(hip_file), tmp_path / "journal")
    yield made
    made.gate.stop()
    made.settled()
