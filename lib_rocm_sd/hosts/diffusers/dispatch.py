"""Ours as an attention backend of diffusers, where its version chooses among backends by name.

register()
pipeline.transformer.set_attention_backend("rocm_sd")

It is the version's own "native" backend, whose call of torch's function is served: so what a mask
means, and what is done with an argument, is that version's. Read in diffusers 0.35.2, 0.36.0 and
0.42.1, models/attention_dispatch.py.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from lib_rocm_sd.engine.session import DEFAULT, Session
from lib_rocm_sd.hosts import optional
from lib_rocm_sd.hosts.attention import Serving, is_serving
from lib_rocm_sd.modules.stand_in import is_compiling

NAME = "rocm_sd"
MEMBER = "ROCM_SD"
MODULE = "diffusers.models.attention_dispatch"
_lock = threading.Lock()


def register(session: Session = DEFAULT) -> str:
    """Make "rocm_sd" a name for `set_attention_backend`, `attention_backend` and the registry.

    Empty, or why this diffusers has no such place; then nothing is changed. Registered again, it
    serves by the newer `session`. Inside `patched` the session of that counts.
    """
    names: Any = optional.attribute(MODULE, "AttentionBackendName")
    registry: Any = optional.attribute(MODULE, "_AttentionBackendRegistry")
    native = _native(names, registry)
    if native is None:
        return "this diffusers has no registry of attention backends, or one of another kind"
    with _lock:
        member = names.__members__.get(MEMBER) or _add_member(names)
        constraints = list(registry._constraints.get(names.NATIVE, ()))
        registry.register(member, constraints=constraints)(_served(native, session))
    return ""


def _native(names: Any, registry: Any) -> Callable[..., Any] | None:
    """The function of the backend "native"; None where something that is needed is missing."""
    needed = ("_member_map_", "_value2member_map_", "_member_names_", "NATIVE")
    if names is None or not all(hasattr(names, name) for name in needed):
        return None
    if not all(hasattr(registry, name) for name in ("register", "_backends", "_constraints")):
        return None
    found: Callable[..., Any] | None = registry._backends.get(names.NATIVE)
    return found


def _add_member(names: Any) -> Any:
    """A member of the enumeration as its own `Enum` class would have made it."""
    member = str.__new__(names, NAME)
    member._name_, member._value_ = MEMBER, NAME
    member._sort_order_ = len(names._member_names_)
    names._member_names_.append(MEMBER)
    names._member_map_[MEMBER] = member
    names._value2member_map_[NAME] = member
    type.__setattr__(names, MEMBER, member)
    return member


def _served(native: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`native`, its torch attention served; with its signature, by which arguments are chosen."""
    mode = Serving(session)

    @functools.wraps(native)
    def rocm_sd(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or is_serving():
            return native(*args, **kwargs)
        with mode:
            return native(*args, **kwargs)

    return rocm_sd
