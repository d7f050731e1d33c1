"""Progress of one picture of ours in the WebUI's bar, and its Interrupt."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from lib_rocm_sd.hosts.webui import host

PATIENCE_S = 3.0
"""A picture that will be done sooner than this is not worth interrupting: it is kept."""


class Watch:
    """Shows the progress of one picture in the WebUI's progress bar, and heeds its Interrupt.

    `subject`: what makes the picture, for people. The WebUI decodes also what an interrupted
    sampler has got so far: only an Interrupt that comes during the work stops it, and only where
    more than `patience_s` is left to do.
    """

    def __init__(
        self,
        subject: str,
        *,
        may_stop: bool,
        visible: bool = True,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._subject = subject
        self._state: Any = host.attribute("modules.shared", "state")
        self._may_stop = may_stop and not self.interrupted
        self._visible, self._patience_s = visible, patience_s
        self._clock = clock
        self._begin = clock()
        self._left_s = math.inf

    def __enter__(self) -> Watch:
        self._text = getattr(self._state, "textinfo", None)
        return self

    def __exit__(self, *error: object) -> None:
        if self._visible and self._state is not None:
            self._state.textinfo = self._text

    def progress(self, done: int, total: int) -> None:
        """Report that `done` of `total` parts are done; 0 while kernels are compiled and tested."""
        self._left_s = (self._clock() - self._begin) / max(done, 1) * (total - done)
        if self._visible and (total > 1 or not done) and self._state is not None:
            shown = f"{done} of {total} parts" if done else "preparing"
            self._state.textinfo = f"{self._subject}: {shown}."

    def interrupt(self) -> bool:
        """True if the work is to stop here."""
        return self._may_stop and self.interrupted and self._left_s > self._patience_s

    @property
    def interrupted(self) -> bool:
        """Whether the user has pressed Interrupt."""
        return bool(getattr(self._state, "interrupted", False))
