"""Modules of Windows made here: DLLs that export and import what a test says, and do nothing."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

_NEWEST, _OLDEST = 24, 16
Imports = Mapping[str, Sequence[str]]


def _program(name: str) -> str | None:
    """The newest clang or linker of this name, as Debian's package or without a number."""
    names = [name, *(f"{name}-{number}" for number in range(_NEWEST, _OLDEST - 1, -1))]
    return next(filter(None, map(shutil.which, names)), None)


def dll(
    path: Path, source: str, imports: Imports | None = None, delayed: Imports | None = None
) -> Path:
    """Compile C to a DLL that needs nothing but `imports`, from other DLLs' names to functions, and
    `delayed`, loaded at their first call. Skips the test where clang or lld is missing.
    """
    clang, linker = _program("clang"), _program("lld-link")
    if clang is None or linker is None:
        pytest.skip("needs clang and lld")
    work = path.parent / f"{path.name}.build"
    work.mkdir(parents=True)
    calls = {**(imports or {}), **(delayed or {})}
    named = [name for names in calls.values() for name in names]
    declared = "".join(f"__declspec(dllimport) int {name}(void);\n" for name in named)
    used = "".join(f"    sum += {name}();\n" for name in named)
    late = "void *__delayLoadHelper2(void *a, void *b) { return 0; }\n" if delayed else ""
    body = f"{declared}{late}int _fltused;\n{source}\n"
    if named:
        body += f"__declspec(dllexport) int use_them(void) {{\n    int sum = 0;\n{used}"
        body += "    return sum;\n}\n"
    (work / "a.c").write_text(body, encoding="utf-8")
    target = "--target=x86_64-pc-windows-msvc"
    _run([clang, target, "-c", "-O1", "-ffreestanding", "a.c", "-o", "a.obj"], work)
    libraries = []
    for index, (name, functions) in enumerate(calls.items()):
        text = f"LIBRARY {name}\nEXPORTS\n" + "".join(f"  {each}\n" for each in functions)
        (work / f"{index}.def").write_text(text, encoding="utf-8")
        _run([linker, f"/def:{index}.def", "/machine:x64", f"/out:{index}.lib"], work)
        libraries.append(f"{index}.lib")
    late_options = [f"/delayload:{name}" for name in delayed or ()]
    options = ["/dll", "/noentry", "/nodefaultlib", *late_options, f"/out:{path}"]
    _run([linker, *options, "a.obj", *libraries], work)
    shutil.rmtree(work)
    path.with_suffix(".lib").unlink(missing_ok=True)
    return path


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr + done.stdout
