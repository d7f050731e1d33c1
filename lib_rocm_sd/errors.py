"""The errors of this package.

A caller's mistake is a plain ValueError; "not for us" is a list of reasons, not an error.
"""

from __future__ import annotations

import re

_LINE = re.compile(r'#line (\d+) "(.*)"')


def numbered(source: str) -> str:
    """`source` with a line number before each line, as compile logs refer to it: after `#line 7
    "mma.h"` comes mma.h's line 7.
    """
    rows: list[str] = []
    number = 1
    for line in source.splitlines():
        directive = _LINE.match(line)
        if directive:
            number = int(directive.group(1))
            rows.append(f"{directive.group(2)}:")
        else:
            rows.append(f"{number:5d}  {line}")
            number += 1
    return "\n".join(rows)


class RocmSdError(RuntimeError):
    """Base of every error that this package raises of its own."""


class CompileError(RocmSdError):
    """A compiler was found and failed.

    `str()` is the short reason; `full()` has the log and the numbered source.
    """

    def __init__(self, compiler: str, reason: str, log: str = "", source: str = "") -> None:
        super().__init__(f"{compiler}: {reason}")
        self.compiler = compiler
        self.reason = reason
        self.log = log
        self.source = source

    def full(self) -> str:
        """Reason, the compiler's log and the numbered source, in this order."""
        return f"{self}\n--- log ---\n{self.log.strip()}\n--- source ---\n{numbered(self.source)}"


class LaunchError(RocmSdError):
    """A driver call returned a status other than success; 0 where there was no such call."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class DeviceOutOfMemoryError(RocmSdError, MemoryError):
    """The driver reported out of memory: passed on to the caller, never handled here."""


class NotSupportedError(RocmSdError):
    """No variant can run this problem. `refusals` maps each variant's name to its reasons."""

    def __init__(self, problem: object, refusals: dict[str, list[str]]) -> None:
        lines = [f"  {name}: {'; '.join(reasons)}" for name, reasons in refusals.items()]
        super().__init__("\n".join([f"nothing here can run {problem}", *lines]))
        self.problem = problem
        self.refusals = refusals
