"""The engine's session of this WebUI: its level, its headroom, its progress and its Interrupt.

The WebUI makes one generation at a time. Sessions are kept, so that a level chosen again finds its
plans again; a live preview's thread reads the one that holds. What Performance has to measure is
measured between two of them.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from lib_rocm_sd import policy
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.webui import host
from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.report import report

PAUSE_S = 0.05
"""In which a picture that waits begins: the WebUI's lock is not always given in order."""

_made: dict[tuple[str, int], Session] = {}
_chosen: list[tuple[str, int]] = [(policy.AUTO.name, 0)]
_measuring, _ending, _idle = threading.Lock(), threading.Event(), threading.Event()
_idle.set()


def current() -> Session:
    """What holds now."""
    return of(*_chosen[0])


def establish(level: str | None = None, headroom_bytes: int | None = None) -> None:
    """Make these hold from now on; None: as before."""
    known_level, known_bytes = _chosen[0]
    bytes_now = known_bytes if headroom_bytes is None else headroom_bytes
    _chosen[0] = (level or known_level, bytes_now)


def of(level: str, headroom_bytes: int) -> Session:
    """The session of a level, always the same one."""
    key = (level, headroom_bytes)
    if key not in _made:
        more = (_progress, interrupted, host.takes_turns)
        _made[key] = Session(policy.by_name(level), headroom_bytes, report, *more)
    return _made[key]


def measure() -> None:
    """Begin, in another thread, to measure what waits for that, one by one while no picture is
    made, also where another level is chosen by now. A picture that begins meanwhile waits for one
    of them at most.
    """
    if engine.unmeasured and not _measuring.locked():
        threading.Thread(target=_measure, name="rocm_sd measuring", daemon=True).start()


def _measure() -> None:
    with _measuring:
        try:
            while engine.unmeasured and _measured_one():
                time.sleep(PAUSE_S)
        except Exception as error:
            host.say_once(f"measuring ended: {trouble.once(error)}")


def end_measuring() -> None:
    """End a measurement that has the WebUI's lock: somebody has pressed a button for which the
    WebUI must be idle. The next picture's end begins it again.
    """
    _ending.set()
    _idle.wait()
    _ending.clear()


def _measured_one() -> bool:
    """False where another level holds by now, or the user has pressed Interrupt: it goes on when
    the next picture ends.
    """
    try:
        with host.between_generations():
            _idle.clear()
            still = interrupted()  # the last picture was

            def stop() -> bool:
                return _ending.is_set() or (interrupted() and not still)

            if current().measures:
                engine.measure_next(interrupt=stop)
            return current().measures and not stop()
    finally:
        _idle.set()


def refusals(op: Op[Any, Any], what: str) -> list[str]:
    """Why our kernels of an op cannot be used here, after compiling and testing what was not yet;
    never raises. The console is told once that `what` is checked; {gfx} in it is the GPU.
    """
    try:
        device = host.device()
        info = identify(device)
        if not info.reasons:
            host.say_once(f"checking {what.format(gfx=info.gfx)}")
        return engine.usable(device, op)
    except Exception as error:
        return [trouble.once(error)]


def _progress(message: str) -> None:
    """In the WebUI's progress bar."""
    state = host.attribute("modules.shared", "state")
    if state is not None:
        state.textinfo = f"{host.NAME}: {message}"


def interrupted() -> bool:
    """True once the user pressed Interrupt or Skip."""
    state = host.attribute("modules.shared", "state")
    return any(bool(getattr(state, name, False)) for name in ("interrupted", "skipped"))
