"""Compilers that had to be ended at their time limit: not waited for again, kernel after kernel and
start after start.
"""

from __future__ import annotations

import json
import time

from lib_rocm_sd import cache

FORGOTTEN_AFTER_S = 86400.0
_KIND = "compilers"
_limits: dict[str, float] = {}


def note(identity: str, limit_s: float) -> None:
    """The compiler of this identity, or what was asked of it, did not end within `limit_s`.

    Kept for a day in the cache.
    """
    if not identity:
        return
    _limits[identity] = max(limit_s, _limits.get(identity, 0.0))
    row = {"limit_s": _limits[identity], "time": time.time()}
    cache.write(_KIND, _key(identity), json.dumps(row).encode())


def refusal(identity: str, limit_s: float) -> str:
    """Why it is not asked for something that may take `limit_s`; empty where it may be.

    One that was given less time than that before is tried again.
    """
    if not identity:
        return ""
    hung_s = _limits.get(identity)
    if hung_s is None:
        hung_s = _limits[identity] = _stored(identity)
    if hung_s < limit_s:
        return ""
    return f"did not end within {hung_s:g} s before, and is left alone for a day"


def forget() -> None:
    """Let every compiler be tried again."""
    for identity in _limits:
        cache.delete(_KIND, _key(identity))
    _limits.clear()


def _stored(identity: str) -> float:
    try:
        row = json.loads(cache.read(_KIND, _key(identity)) or b"{}")
        recent = abs(time.time() - row["time"]) < FORGOTTEN_AFTER_S
        return float(row["limit_s"]) if recent else 0.0
    except (ValueError, TypeError, KeyError):
        return 0.0


def _key(identity: str) -> str:
    return cache.key_of("compiler hung 1", identity)
