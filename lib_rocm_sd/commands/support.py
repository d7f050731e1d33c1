"""What the commands share: choices, a plain table, and what says who somebody is left out.

Needs no torch.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib_rocm_sd.arch import Arch, amd_table, table
from lib_rocm_sd.ops.registry import FAMILIES

if TYPE_CHECKING:
    import torch


class UsageError(ValueError):
    """The command line names something that does not exist; the message lists what does."""


def add_choices(parser: argparse.ArgumentParser, known: Iterable[str] = FAMILIES) -> None:
    """--arch, --op and --json."""
    parser.add_argument(
        "--arch", default="all", help="'all', or gfx ids separated by commas (default: all)"
    )
    parser.add_argument(
        "--op", default="all", help=f"'all', or of: {', '.join(known)} (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON; progress goes to stderr")


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device."""
    parser.add_argument("--device", help="a torch device; default: the GPU, else the CPU")


def device_of(args: argparse.Namespace) -> torch.device:
    """What --device names, else the GPU, else the CPU. Imports torch."""
    import torch

    return torch.device(args.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """--dtype of a pipeline."""
    parser.add_argument(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        help="default: float16 on a GPU, float32 on the CPU",
    )


def dtype_of(args: argparse.Namespace, device: torch.device) -> str:
    """The name of the dtype that --dtype names, else of the device's usual one."""
    return str(args.dtype or ("float32" if device.type == "cpu" else "float16"))


def arches_of(choice: str) -> list[Arch]:
    """The rows that --arch names. Raises UsageError for an unknown one."""
    if choice == "all":
        return list(amd_table().values())
    rows = table()
    names = [name.strip() for name in choice.split(",") if name.strip()]
    unknown = [name for name in names if name not in rows]
    if unknown or not names:
        raise UsageError(
            f"--arch: {_unknown('no GPU is called', unknown)}; known: {', '.join(rows)}"
        )
    return [rows[name] for name in dict.fromkeys(names)]


def _unknown(what: str, names: Sequence[str]) -> str:
    named = ", ".join(filter(None, names))
    return f"{what} {named}" if named else "it is empty"


def ops_of(choice: str, known: Iterable[str] = FAMILIES) -> list[str]:
    """The ops that --op names, of those `known`. Raises UsageError for an unknown one."""
    known = list(known)
    names = known if choice == "all" else [name.strip() for name in choice.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"--op: {_unknown('no op is called', unknown)}; known: {', '.join(known)}")
    return list(dict.fromkeys(names))


def kernel_modules_of(choice: str) -> list[Any]:
    """The kernel modules of the ops that --op names. Raises UsageError for an unknown one."""
    return [FAMILIES[name].kernel for name in ops_of(choice)]


def as_table(rows: Sequence[Sequence[object]]) -> str:
    """Rows, the first one the heads, in aligned columns: numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [
        all(isinstance(cell, (int, float)) or cell == "" for cell in column[1:])
        for column in zip(*rows, strict=True)
    ]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join(lines)


def anonymous(value: Any, home: str | None = None, user: str | None = None) -> Any:
    """`value` with, in every string, the home folder as ~ and the user's name in paths as USER."""
    home = _home() if home is None else home
    user = _user() if user is None else user
    if isinstance(value, str):
        return _hidden(value, home, user)
    if isinstance(value, dict):
        return {key: anonymous(item, home, user) for key, item in value.items()}
    if isinstance(value, list):
        return [anonymous(item, home, user) for item in value]
    return value


def _home() -> str:
    try:
        return str(Path.home())
    except RuntimeError:
        return ""


def _user() -> str:
    return os.environ.get("USERNAME") or os.environ.get("USER") or os.environ.get("LOGNAME") or ""


def _hidden(text: str, home: str, user: str) -> str:
    if len(home) > 1:
        for form in (home, home.replace("\\", "/"), home.replace("\\", "\\\\")):
            text = re.sub(re.escape(form) + r"(?![\w.-])", "~", text, flags=re.IGNORECASE)
    if user:
        text = re.sub(rf"(?<=[/\\]){re.escape(user)}(?=[/\\]|$)", "USER", text)
    return text
