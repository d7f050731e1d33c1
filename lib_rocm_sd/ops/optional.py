"""Packages that may be installed or not: imported when a variant is asked for, never before."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import reasons
from lib_rocm_sd.ops.lazily import torch

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


@contextmanager
def calling(package: str) -> Iterator[None]:
    """Within this, whatever a package says of a call is the RuntimeError that the engine expects of
    a variant that fails; what is one already, such as "out of memory", stays what it is.
    """
    try:
        yield
    except (RuntimeError, OSError):
        raise
    except BROKEN as error:
        raise RuntimeError(f"{package}: {type(error).__name__}: {error}") from error


def module(name: str) -> ModuleType:
    """`name`, of which `absent` says that it can be imported."""
    return importlib.import_module(name)


# Whether our kernels in Triton (triton_kernels/) can run here.


TRITON = ("triton", "lib_rocm_sd.triton_kernels.run")
"""The package, and the module that launches them."""


def triton_refusals(arch: Arch | None) -> list[str]:
    """Why no kernel of ours in Triton can run here."""
    none = card_refusals(arch)
    if none:
        return none
    why = absent(*TRITON) or module(TRITON[1]).too_old()
    return [why] if why else []


# Whether what belongs to other libraries can run on a GPU here.


def card_refusals(arch: Arch | None) -> list[str]:
    """Why nothing can run on a GPU in this process. torch is not made to begin with its GPUs for
    the question: before it has, no input lies on one.
    """
    return reasons((arch is None or not torch.cuda.is_initialized(), "no supported GPU"))
