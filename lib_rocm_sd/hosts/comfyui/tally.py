"""What was ours in this process, what was left to ComfyUI, and why."""

from __future__ import annotations

import threading
from collections import Counter

from lib_rocm_sd.report import Report, report

ATTENTION, UNET = "attention", "UNet"
LEFT = "left to ComfyUI's own code: "
"""How the report's events about calls begin."""


class Tally:
    """Counts calls, for several threads; a reason is told to the report at its first call."""

    def __init__(self, told: Report = report) -> None:
        self._report = told
        self._lock = threading.Lock()
        self.ours: Counter[str] = Counter()
        self.left: Counter[tuple[str, str]] = Counter()
        """By what was asked for, and why ComfyUI computed it."""

    def served(self, what: str) -> None:
        with self._lock:
            self.ours[what] += 1

    def leave(self, what: str, why: str) -> None:
        """A call is ComfyUI's own."""
        with self._lock:
            self.left[what, why] += 1
            first = self.left[what, why] == 1
        if first:
            self._report.event(f"{LEFT}{what}: {why}")

    def clear(self) -> None:
        with self._lock:
            self.ours.clear()
            self.left.clear()


tally = Tally()
"""The process's."""
