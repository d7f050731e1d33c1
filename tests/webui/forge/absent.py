"""Stands in for what a real Forge's modules import and the tests' checkpoint has no use for."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

ABSENT = ("torchvision", "modules.safe", "modules.sd_vae_taesd")


class _Absent(MetaPathFinder, Loader):
    """The last that is asked: only for what is nowhere."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        wanted = any(f"{name}.".startswith(f"{absent}.") for absent in ABSENT)
        return ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        made: Any = ModuleType(spec.name)
        made.__getattr__ = lambda name: MagicMock()
        return made  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        pass


def allow_absent() -> None:
    """From now on, in this process."""
    if not any(isinstance(finder, _Absent) for finder in sys.meta_path):
        sys.meta_path.append(_Absent())
