"""Lines on the console that cannot fail: a character that it lacks is escaped, and a line is lost
where there is no console, or one that is closed.
"""

from __future__ import annotations

import io
import logging
import sys
import traceback
from contextlib import suppress
from functools import partialmethod

ESCAPE = "backslashreplace"


def say(line: str) -> None:
    """A line on standard output, shown at once."""
    with suppress(Exception):  # a host's own stream may raise anything
        print(_printable(line), flush=True)


def escape() -> None:
    """For programs of our own: standard output escapes what it lacks, whoever prints."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=ESCAPE)


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
