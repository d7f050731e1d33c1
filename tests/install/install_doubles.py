"""A start of install.py: where it lies, what GPUs it finds, and a stand-in for building."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path

import pytest

import install
from lib_rocm_sd import arch, device
from lib_rocm_sd.runtime.torch_build import TorchBuild

SCRIPT = Path(install.__file__)
GFX1100 = arch.table()["gfx1100"]
ROCM = TorchBuild("2.9.0+rocm6.4", None, "6.4.43482")


class Builder:
    """Stands for runtime.build: a specification is cached once built."""

    def __init__(self, outcome: Callable[[], object] | None = None) -> None:
        self.built: list[object] = []
        self.outcome = outcome

    def is_cached(self, spec: object, _arch: object) -> bool:
        return spec in self.built

    def build(self, spec: object, _arch: object) -> object:
        if self.outcome is not None:
            self.outcome()
        self.built.append(spec)
        return types.SimpleNamespace(code=b"", compiler="clang", cached=False, seconds=0.5)


def gpus(monkeypatch: pytest.MonkeyPatch, *gfx: str) -> None:
    monkeypatch.setattr(device, "kfd_gpus", lambda: list(gfx))
