"""The engine's sessions of this ComfyUI, one a level; kept, so that plans are found again."""

from __future__ import annotations

from lib_rocm_sd import policy
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts.comfyui import host
from lib_rocm_sd.report import report

_made: dict[str, Session] = {}


def of(level: str) -> Session:
    """The session of a level, always the same one. ValueError where there is no such level."""
    if level not in _made:
        _made[level] = Session(policy.by_name(level), 0, report, host.say, host.interrupted)
    return _made[level]
