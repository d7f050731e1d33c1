"""What a call costs, counted: the same however busy the machine is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def calls_of(work: Callable[[], object]) -> int:
    """How many functions, Python's and C's, `work` calls."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count - 2  # `work` itself, and sys.setprofile
