"""A clock that a test turns."""

from __future__ import annotations


class Clock:
    """Stands for time.monotonic and its like: seconds pass only where somebody says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def turn(self, seconds: float) -> None:
        """Let so many pass."""
        self.now_s += seconds
