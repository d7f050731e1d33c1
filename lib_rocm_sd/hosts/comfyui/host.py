"""What we use of ComfyUI; nothing raises where a piece is missing.

Read in Comfy-Org/ComfyUI a125cd84 (0.3.64): comfy/model_management.py, comfy/utils.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from lib_rocm_sd.hosts import trouble

NAME = "ROCm SD"


def module(name: str) -> ModuleType | None:
    """ComfyUI's module `name`; None where it has none, or where importing it fails."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None
    except Exception as error:
        trouble.once(error)
        return None


def attribute(name: str, *path: str) -> Any:
    """What `path` leads to in ComfyUI's module `name`; None where a step is missing."""
    found: Any = module(name)
    for step in path:
        found = getattr(found, step, None)
    return found


def device() -> torch.device:
    """The device that ComfyUI computes on."""
    asked = attribute("comfy.model_management", "get_torch_device")
    found = asked() if callable(asked) else None
    return found if isinstance(found, torch.device) else torch.device("cpu")


def interrupted() -> bool:
    """True once the user has pressed Cancel, until ComfyUI has heeded it."""
    asked = attribute("comfy.model_management", "processing_interrupted")
    return bool(asked()) if callable(asked) else False


def stop_if_interrupted() -> None:
    """Raise what ComfyUI raises where the user has pressed Cancel."""
    raises = attribute("comfy.model_management", "throw_exception_if_processing_interrupted")
    if callable(raises):
        raises()


def out_of_memory() -> type[Exception]:
    """What ComfyUI takes for "out of memory"."""
    found = attribute("comfy.model_management", "OOM_EXCEPTION")
    return found if isinstance(found, type) and issubclass(found, Exception) else MemoryError


def progress_bar() -> Callable[[int, int], None]:
    """Shows (done, total) on the node that runs."""
    kind = attribute("comfy.utils", "ProgressBar")
    bar: list[Any] = []

    def show(done: int, total: int) -> None:
        if kind is None or (total < 2 and done):
            return
        if not bar:
            bar.append(kind(total))
        bar[0].update_absolute(done, total)

    return show
