"""The engine's session of this WebUI: its level, its headroom, its progress and its Interrupt.

The WebUI makes one generation at a time. Sessions are kept, so that a level chosen again finds its
plans again; a live preview's thread reads the one that holds.
"""

from __future__ import annotations

from typing import Any

from lib_rocm_sd import policy
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.webui import host
from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.report import report

_made: dict[tuple[str, int], Session] = {}
_chosen: list[tuple[str, int]] = [(policy.AUTO.name, 0)]


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
        _made[key] = Session(policy.by_name(level), headroom_bytes, report, _progress, _interrupted)
    return _made[key]


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


def _interrupted() -> bool:
    """True once the user pressed Interrupt or Skip."""
    state = host.attribute("modules.shared", "state")
    return any(bool(getattr(state, name, False)) for name in ("interrupted", "skipped"))
