"""Errors that a host must not see: their tracebacks go to the log."""

from __future__ import annotations

import traceback

from lib_rocm_sd import console
from lib_rocm_sd.engine.selftest import describe

log = console.Log()
_logged: set[tuple[object, ...]] = set()


def once(error: BaseException) -> str:
    """One line about an error that goes no further. Its traceback is logged, once for each place.

    Two errors of a class are of one place if they were raised in one line and caught in one
    function, whatever their messages say.
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = [(frame.filename, frame.lineno) for frame in (*frames[:1], *frames[-1:])]
    key = (type(error), *place)
    if key not in _logged:
        _logged.add(key)
        log.error("an error was caught: %s", describe(error), exc_info=error)
    return describe(error)
