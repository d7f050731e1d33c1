"""Nothing of ours is launched in a host's process that a child did not find right."""

from __future__ import annotations

import threading

from lib_rocm_sd import console
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.trials.gate import GateState, Say, put_before

log = console.Log()
_lock = threading.Lock()


def state() -> GateState:
    """How far trials are."""
    now: GateState = getattr(engine.gate, "state", GateState)()
    return now


def begin(say: Say = log.info) -> None:
    """Put a gate before the process's engine where it has none."""
    with _lock:
        if engine.gate is None:
            put_before(engine, say)
