"""A host's own modules, of which pieces may be missing; nothing here raises."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from lib_rocm_sd.hosts import trouble


def module(name: str) -> ModuleType | None:
    """The host's module `name`; None where it has none, or where importing it fails."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None
    except Exception as error:
        trouble.once(error)
        return None


def attribute(name: str, *path: str) -> Any:
    """What `path` leads to in the host's module `name`; None where a step is missing."""
    thing: Any = module(name)
    for step in path:
        thing = getattr(thing, step, None)
    return thing
