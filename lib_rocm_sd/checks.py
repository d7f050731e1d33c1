"""What is asked of files and devices that a command line names, before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

MOST_TEXT = 300


class UsageError(ValueError):
    """The command line names what does not exist or cannot be used; the message says which."""


def told(path: str | Path, error: Exception) -> str:
    """The file's name and what went wrong with it, in a line."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{path}: {' '.join(why.split())[:MOST_TEXT]}"


def unwritable(path: str | Path) -> str:
    """Why a file cannot be written, asked before there is anything to write; empty if it can."""
    file = Path(path).absolute()
    if file.is_dir():
        return f"{path} is a folder, not a file"
    if not file.parent.is_dir():
        return f"there is no folder {file.parent}"
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        return f"{path} cannot be written: permission denied"
    return ""


def device_problem(name: str | None) -> str:
    """Why --device cannot be used; empty if it can, or none was named."""
    import torch

    try:
        kind = torch.empty(0, device=name).device.type
    except (RuntimeError, AssertionError, ValueError) as error:
        return f"--device {name} cannot be used: {str(error).splitlines()[0]}"
    return "" if kind in ("cpu", "cuda") else f"--device {name} is neither a GPU nor the CPU"
