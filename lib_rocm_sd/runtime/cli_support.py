"""What the commands `compile` and `inspect` share: the choice of rows and ops, a plain table."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from lib_rocm_sd.arch import Arch, amd_table, table
from lib_rocm_sd.ops.base import KernelSpec

OPS = {
    "attention": "lib_rocm_sd.ops.attention_kernel",
    "group_norm": "lib_rocm_sd.ops.group_norm_kernel",
}


class UsageError(ValueError):
    """The command line names something that does not exist; the message lists what does."""


def add_choices(parser: argparse.ArgumentParser) -> None:
    """--arch, --op and --json."""
    parser.add_argument(
        "--arch", default="all", help="'all', or gfx ids separated by commas (default: all)"
    )
    parser.add_argument(
        "--op", default="all", help=f"'all', or of: {', '.join(OPS)} (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON; progress goes to stderr")


def arches_of(choice: str) -> list[Arch]:
    """The rows that --arch names. Raises UsageError for an unknown one."""
    if choice == "all":
        return list(amd_table().values())
    rows = table()
    names = [name.strip() for name in choice.split(",") if name.strip()]
    unknown = [name for name in names if name not in rows]
    if unknown or not names:
        raise UsageError(
            f"no row for {', '.join(unknown) or 'an empty list'}; known: {', '.join(rows)}"
        )
    return [rows[name] for name in dict.fromkeys(names)]


def kernel_modules_of(choice: str) -> list[Any]:
    """The kernel modules of the ops that --op names. Raises UsageError for an unknown one."""
    names = list(OPS) if choice == "all" else [name.strip() for name in choice.split(",")]
    unknown = [name for name in names if name not in OPS]
    if unknown:
        raise UsageError(f"no op {', '.join(unknown)}; known: {', '.join(OPS)}")
    return [importlib.import_module(OPS[name]) for name in names]


def label(spec: KernelSpec) -> str:
    """A spec's name and definitions in one line."""
    return " ".join([spec.entry, *(f"{name}={value}" for name, value in spec.defines)])


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
