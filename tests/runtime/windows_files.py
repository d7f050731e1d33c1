"""Modules of Windows made here: DLLs that export and import what a test says, and do nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tools.windows_python import MissingError, linked

Calls = Mapping[str, Sequence[str]]
DELAYED = r"""
typedef struct { unsigned attributes, name, module, addresses, names; } delay;
extern char __ImageBase;
void *LoadLibraryA(const char *);
void *GetProcAddress(void *, const char *);
void *__delayLoadHelper2(const delay *what, void **entry) {
    char *base = &__ImageBase;
    unsigned long long index = entry - (void **)(base + what->addresses);
    unsigned name = ((unsigned long long *)(base + what->names))[index];
    return *entry = GetProcAddress(LoadLibraryA(base + what->name), base + name + 2);
}
"""
"""What Microsoft's delayimp.lib has: the library is loaded at its first call."""


def dll(path: Path, source: str, calls: Calls | None = None, delayed: Calls | None = None) -> Path:
    """Compile C to a DLL that needs nothing but `calls`, functions by their DLL's name, and
    `delayed`, loaded at their first call. Skips the test where clang or lld is missing.
    """
    kernel = {"kernel32.dll": ("LoadLibraryA", "GetProcAddress")} if delayed else {}
    options = ["/dll", "/noentry", *(f"/delayload:{name}" for name in delayed or ())]
    text = f"int _fltused;\n{DELAYED if delayed else ''}{source}"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        linked(path, text, {**kernel, **(calls or {}), **(delayed or {})}, *options)
    except MissingError as error:
        pytest.skip(f"needs clang and lld: {error}")
    return path


def answering(**answers: int | str) -> str:
    """C of exported functions without arguments, by what they give: a number, or a call's text."""
    return "".join(
        f"int {answer}(void);\n__declspec(dllexport) int {name}(void) {{ return {answer}(); }}\n"
        if isinstance(answer, str)
        else f"__declspec(dllexport) int {name}(void) {{ return {answer}; }}\n"
        for name, answer in answers.items()
    )
