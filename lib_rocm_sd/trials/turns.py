"""When a class may be tried: while nobody needs the card, or in a turn between two pictures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

BUSY_POLL_S = 0.25
QUIET_S = 0.5
"""A pause is one after this long: between the pictures of a series there are shorter ones, in which
a child could only be started and ended.
"""
PATIENCE_S = 10.0
"""After this long without a pause a turn is asked for: who makes picture after picture would else
never have ours.
"""
TURN_S = 5.0
"""In a turn no class is begun after this; somebody waits for their picture."""

Turn = Callable[[], AbstractContextManager[Any]]


class Turns:
    """Turns of one thread. `busy()`: somebody needs the card now. `turn()`: a context entered when
    the thread's turn comes; nobody needs the card until it is left. None: the thread waits for
    pauses.
    """

    def __init__(self, busy: Callable[[], bool], turn: Turn | None = None) -> None:
        self._busy, self._turn = busy, turn
        self._held = ExitStack()
        self._ends_s = 0.0
        self._needed_s = -math.inf

    def come(self, given_up: Callable[[], bool], meanwhile: Callable[[], None]) -> bool:
        """Wait until a class may be begun; False where it was given up. `meanwhile()` is called
        while somebody needs the card.
        """
        if self._ends_s > time.monotonic():
            return not given_up()
        self.leave()
        begun_s = time.monotonic()
        while not given_up() and self._is_needed():
            meanwhile()
            if self._turn is not None and time.monotonic() - begun_s >= PATIENCE_S:
                self._held.enter_context(self._turn())
                self._ends_s = time.monotonic() + TURN_S
                break
            time.sleep(BUSY_POLL_S)
        return not given_up()

    def _is_needed(self) -> bool:
        """Now, or a moment ago."""
        now_s = time.monotonic()
        if self._busy():
            self._needed_s = now_s
        return now_s - self._needed_s < QUIET_S

    def leave(self) -> None:
        """Let others go on, if they wait."""
        self._ends_s = 0.0
        self._held.close()
