"""Lines on the console that cannot fail: a character that it lacks is escaped, and a line is lost
where there is no console, or one that is closed.
"""

from __future__ import annotations

import io
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partialmethod
from pathlib import Path
from typing import TextIO

ESCAPE = "backslashreplace"
SELDOM_S = 15.0
"""Between two lines of progress where there is no terminal."""


def say(line: str) -> None:
    """A line on standard output, shown at once."""
    with suppress(Exception):  # a host's own stream may raise anything
        print(_printable(line), flush=True)


def escape() -> None:
    """For programs of our own: standard output escapes what it lacks, whoever prints."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=ESCAPE)


def how_far(doing: str, done: int, total: int, left_s: float) -> str:
    """'trying kernels, 40 of 195, about 30 s'; without the time where it is 0."""
    return f"{doing} kernels, {done} of {total}" + (f", about {rounded(left_s)}" if left_s else "")


def left_s(begun_s: float, done: int, total: int) -> float:
    """How long the rest will take, by what `done` have taken since `begun_s` of time.monotonic."""
    return (time.monotonic() - begun_s) / done * (total - done)


def rounded(seconds: float) -> str:
    """A time to come, no more exact than it is known."""
    if seconds < 60:
        return f"{5 * math.ceil(seconds / 5)} s"
    return f"{math.ceil(seconds / 60)} min"


class Progress:
    """One line that is renewed while something takes long, on the terminal itself: a host may keep
    both our streams until the end (run_extension_installer in the WebUI's modules/launch_utils.py).
    Where there is no terminal, `otherwise` gets it every SELDOM_S.
    """

    def __init__(self, otherwise: Callable[[str], object] = lambda text: None) -> None:
        self._terminal, self._otherwise = _terminal(), otherwise
        self._shown = 0
        self._next_s = time.monotonic() + SELDOM_S

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
        if self._terminal is not None:
            with suppress(OSError):
                self._terminal.close()

    def show(self, text: str) -> None:
        """Put it in the place of what was shown. The cursor stays before it, for others' lines."""
        if self._terminal is not None:
            most = 79
            with suppress(OSError, ValueError):  # older Pythons on Windows know but three files
                most = (os.get_terminal_size(self._terminal.fileno()).columns or 80) - 1
            with suppress(OSError):  # the terminal was closed
                self._terminal.write(f"\r{text[:most].ljust(self._shown)}\r")
                self._terminal.flush()
                self._shown = len(text[:most])
        elif time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + SELDOM_S
            self._otherwise(text)

    def clear(self) -> None:
        """Take it away, for a line of another's."""
        if self._shown:
            self.show("")


def _terminal() -> TextIO | None:
    """The terminal that this process was started in, wherever its streams lead; None where there is
    none, or where it works in the background of one.
    """
    with suppress(OSError):
        if sys.platform == "win32":  # Python writes there what Unicode has, whatever the code page
            return Path("CONOUT$").open("w", encoding="utf-8")
        terminal = Path("/dev/tty").open("w", encoding="utf-8")  # noqa: SIM115
        if os.tcgetpgrp(terminal.fileno()) == os.getpgrp():
            return terminal
        terminal.close()
    return None


class Log:
    """A logger, with the levels and handlers that the host gives it. The first argument of its
    methods is a format, the others are its values; `exc_info` is an error whose traceback follows.
    """

    def __init__(self, name: str = "rocm_sd") -> None:
        self._logger = logging.getLogger(name)

    def _log(
        self, level: int, line: str, *values: object, exc_info: BaseException | None = None
    ) -> None:
        with suppress(Exception):  # logging's report of a handler that failed may fail itself
            if self._logger.isEnabledFor(level):
                told = [line % values] if values else [line]
                if exc_info is not None:
                    told += ["\n", *traceback.format_exception(exc_info)]
                self._logger.log(level, "%s", _printable("".join(told).rstrip()))

    info = partialmethod(_log, logging.INFO)
    warning = partialmethod(_log, logging.WARNING)
    error = partialmethod(_log, logging.ERROR)


def _printable(text: str) -> str:
    """What standard output and standard error lack is escaped; one without encoding has ASCII."""
    for stream in (sys.stdout, sys.stderr):
        encoding = getattr(stream, "encoding", None) or "ascii"
        text = text.encode(encoding, ESCAPE).decode(encoding)
    return text
