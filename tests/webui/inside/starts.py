"""Makes the hundreds of starts of the double cheaper: each executes some 150 modules anew.

What Python does at each import and what comes out the same every time is done once: reading a
module's code from its file, and compiling what `dataclasses` writes as text. The modules themselves
are executed at every start.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

_codes: dict[tuple[int, int, int], CodeType] = {}
_from_file = SourceFileLoader.get_code


@cache
def _compiled(text: str) -> CodeType:
    return compile(text, "<string>", "exec", dont_inherit=True)


def _execute(text: str, *scopes: Any) -> None:
    exec(_compiled(text), *scopes)


def _code(self: SourceFileLoader, fullname: str) -> CodeType | None:
    """One code for all the links that lead to a file."""
    file = Path(self.path).stat()
    key = (file.st_dev, file.st_ino, file.st_mtime_ns)
    if key not in _codes:
        code = _from_file(self, fullname)
        if code is None:
            return None
        _codes[key] = code
    return _codes[key]


def make_cheaper() -> None:
    vars(dataclasses)["exec"] = _execute
    SourceFileLoader.get_code = _code  # type: ignore[method-assign]
