"""Every start of install.py begins without the user's own settings."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import install
from lib_rocm_sd import device, present
from lib_rocm_sd.runtime import build, compilers, torch_build
from tests.install.install_doubles import ROCM, Builder


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COMMANDLINE_ARGS", "SD_WEBUI_CACHE_DIR", device.OVERRIDE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["install.py"])
    monkeypatch.setattr(present, "WSL", Path("/nonexistent"))


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Builder:
    double = Builder()
    monkeypatch.setattr(build, "is_cached", double.is_cached)
    monkeypatch.setattr(build, "build", double.build)
    monkeypatch.setattr(compilers, "serves", lambda arch: True)
    monkeypatch.setattr(torch_build, "installed", lambda: ROCM)
    monkeypatch.setattr(install, "try_kernels", lambda chosen, folder, deadline: None)
    monkeypatch.setenv("ROCM_SD_COMPILE_TIME_LIMIT_S", "60")
    return double
