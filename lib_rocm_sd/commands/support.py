"""What the commands share: options and what they name, the GPU that is tested or measured, a plain
table, and texts without what says who somebody is. Needs no torch before a device is asked for.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib_rocm_sd import device
from lib_rocm_sd.arch import Arch, amd_table, table
from lib_rocm_sd.checks import UsageError, device_problem, unwritable
from lib_rocm_sd.ops.registry import FAMILIES

if TYPE_CHECKING:
    import torch

    from lib_rocm_sd.device import DeviceInfo
    from lib_rocm_sd.ops.base import KernelSpec


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
    """What --device names, else the GPU, else the CPU. UsageError where it cannot be used."""
    import torch

    problem = device_problem(args.device)
    if problem:
        raise UsageError(problem)

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


def check_writable(args: argparse.Namespace, *names: str) -> None:
    """Raises UsageError where one of these options names a file that cannot be written."""
    for name in names:
        why = unwritable(getattr(args, name)) if getattr(args, name) else ""
        if why:
            raise UsageError(f"--{name}: {why}")


def arches_of(choice: str) -> list[Arch]:
    """The rows that --arch names. Raises UsageError for an unknown one."""
    if choice == "all":
        return list(amd_table().values())
    return [table()[name] for name in _named("--arch: no GPU", choice, table())]


def ops_of(choice: str, known: Iterable[str] = FAMILIES) -> list[str]:
    """The ops that --op names, of those `known`. Raises UsageError for an unknown one."""
    return list(known) if choice == "all" else _named("--op: no op", choice, list(known))


def _named(nothing: str, choice: str, known: Collection[str]) -> list[str]:
    option, _, what = nothing.partition(": ")
    names = [name.strip() for name in choice.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        why = f"{what} is called {', '.join(unknown)}" if unknown else "it is empty"
        raise UsageError(f"{option}: {why}; known: {', '.join(known)}")
    return list(dict.fromkeys(names))


def kernel_modules_of(choice: str) -> list[Any]:
    """The kernel modules of the ops that --op names. Raises UsageError for an unknown one."""
    return [FAMILIES[name].kernel for name in ops_of(choice)]


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine that our kernels serve."""

    place: torch.device
    info: DeviceInfo
    arch: Arch


def places() -> list[torch.device]:
    """Every GPU of torch's, else the CPU."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", index) for index in range(count)] or [torch.device("cpu")]


def gpu(index: int | None) -> Gpu:
    """The GPU of this number, else the first that our kernels serve. Raises UsageError with the
    reasons why there is none.
    """
    from lib_rocm_sd.trials import zluda

    asked = [place for place in places() if index is None or (place.index or 0) == index]
    zluda.settle(asked)
    infos = [device.identify(place) for place in asked]
    for place, info in zip(asked, infos, strict=True):
        if not info.reasons and info.arch is not None:
            return Gpu(place, info, info.arch)
    raise UsageError("; ".join(infos[0].reasons) if infos else "torch has no GPU of that number")


Step = Callable[[str, int, int], None]
"""Told what is done now, how many of its kind are done, and of how many."""


def unseen(text: str, done: int, total: int) -> None:
    """The step that nobody looks at."""


def compile_missing(
    specs: Iterable[KernelSpec], arch: Arch, say: Callable[[str], None], step: Step = unseen
) -> None:
    """Compile what is not cached, two for each core at a time; who uses it says what failed."""
    from lib_rocm_sd.runtime import build

    missing = [spec for spec in dict.fromkeys(specs) if not build.is_cached(spec, arch)]
    at_once = 2 * (os.cpu_count() or 1)
    for done in range(0, len(missing), at_once):
        say(f"compiling: {done} of {len(missing)} kernels are done")
        step("compiling kernels", done, len(missing))
        build.build_all(missing[done : done + at_once], arch)


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
    if user is None:
        user = next(filter(None, map(os.environ.get, ("USERNAME", "USER", "LOGNAME"))), "")
    if isinstance(value, dict):
        return {key: anonymous(item, home, user) for key, item in value.items()}
    if isinstance(value, list):
        return [anonymous(item, home, user) for item in value]
    if not isinstance(value, str):
        return value
    if len(home) > 1:
        for form in (home, home.replace("\\", "/"), home.replace("\\", "\\\\")):
            value = re.sub(re.escape(form) + r"(?![\w.-])", "~", value, flags=re.IGNORECASE)
    if user:
        value = re.sub(rf"(?<=[/\\]){re.escape(user)}(?=[/\\]|$)", "USER", value)
    return value


def _home() -> str:
    try:
        return str(Path.home())
    except RuntimeError:
        return ""
