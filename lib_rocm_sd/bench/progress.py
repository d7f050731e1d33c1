"""What a benchmark says while it runs: which case it is at, and about how long the rest takes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence


class Countdown:
    """`work`: how much each case is, in any unit. The estimate comes once a case is done."""

    def __init__(self, work: Sequence[float], clock: Callable[[], float] = time.monotonic) -> None:
        self._work = work
        self._clock = clock
        self._done = 0
        self._begin = clock()

    def next(self, text: str) -> None:
        """Say that the next case begins."""
        behind, ahead = sum(self._work[: self._done]), sum(self._work[self._done :])
        left = ""
        if behind > 0:
            left = f" ({duration((self._clock() - self._begin) / behind * ahead)} left)"
        self._done += 1
        say(f"[{self._done}/{len(self._work)}] {text}{left}")


def duration(seconds: float) -> str:
    """About how long, in words."""
    if seconds < 90:
        return f"about {max(round(seconds), 1)} s"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} min"
    return f"about {round(seconds / 3600)} h"


def say(line: str) -> None:
    """A line of progress on stderr, shown at once: stdout has the result alone."""
    print(line, file=sys.stderr, flush=True)
