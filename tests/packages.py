"""Packages that are not installed here, for tests: modules put where Python looks for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from lib_rocm_sd.ops import optional


@contextmanager
def installed(*names: str, **contents: Any) -> Iterator[ModuleType]:
    """Within this, modules of these names can be imported; the last one has `contents`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            module = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None)
            patch.setitem(sys.modules, name, module)
        for name, item in contents.items():
            setattr(module, name, item)
        optional.absent.cache_clear()
        try:
            yield module
        finally:
            optional.absent.cache_clear()
