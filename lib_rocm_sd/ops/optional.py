"""Packages that may be installed or not: imported when a variant is asked for, never before."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType

BROKEN = (
    *(ImportError, OSError, RuntimeError, TypeError, AttributeError, ValueError, LookupError),
    *(AssertionError, NameError, SyntaxError),
)
"""What importing a package dies of that was built for another torch, Python or card."""


@cache
def absent(package: str, module: str) -> str:
    """Why `module`, which belongs to or needs `package`, cannot be imported; empty if it can.

    Found out once: a broken package is slow to import in vain.
    """
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # ValueError: something without a spec bears its name
        found = None
    if found is None:
        return f"{package} is not installed"
    try:
        importlib.import_module(module)
    except BROKEN as error:
        said = str(error).strip().splitlines()
        told = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
        return f"{package} cannot be used: {told}"
    return ""


def module(name: str) -> ModuleType:
    """`name`, of which `absent` says that it can be imported."""
    return importlib.import_module(name)
