"""Waiting for what others do, however long it takes a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 600.0
"""Only stops a test that hangs."""
POLL_S = 0.01


def wait_until(true: Callable[[], object]) -> bool:
    """Whether it comes true."""
    end = time.monotonic() + WAIT_S
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True
