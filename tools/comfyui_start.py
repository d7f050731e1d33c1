"""Starts a ComfyUI, with nothing in the place of packages that it imports and we do not use.

python tools/comfyui_start.py CHECKOUT [FLAG ...]

Those of `NAMES` that are not installed become modules whose every name is an empty class.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

NAMES = ("torchvision", "torchaudio", "av", "kornia", "spandrel")


class Empty(types.ModuleType):
    """A package that has everything, and nothing in it."""

    __path__: Any = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder:
    """Finds those packages, and all that would be in them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        missing = name.partition(".")[0] in self._names
        return ModuleSpec(name, self, is_package=True) if missing else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to execute."""


def main(argv: list[str]) -> None:
    """Run ComfyUI's main.py as if it had been started itself."""
    checkout, flags = Path(argv[0]).resolve(), argv[1:]
    missing = [name for name in NAMES if importlib.util.find_spec(name) is None]
    sys.meta_path.append(Finder(missing))  # type: ignore[arg-type]
    os.chdir(checkout)
    sys.path[0] = str(checkout)
    sys.argv = ["main.py", *flags]
    runpy.run_path(str(checkout / "main.py"), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
