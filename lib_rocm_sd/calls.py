"""Calls that a program makes again and again, each from its own place: looked at once, then made.

functional.py looks at the shapes, strides and dtypes of each call, and finds its route by them. A
block of a UNet makes ten calls, all of whose shapes follow from what it is given and from its
weights. So these are its facts, and while they stay the same, a place keeps its route.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.route import Route
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.ops.base import Op

MOST_FACTS = 8
"""Of one program: sizes of pictures, and of prompts, between which a sampler changes."""


class Routes(dict[str, Route]):
    """By place. `left`: why the program is better left to others; None where nobody has looked."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        super().__init__()
        self.left: str | None = None


class Places:
    """What the places of one program lead to, by its facts. Threads may share it."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Routes] = {}

    def of(self, facts: Hashable) -> Routes:
        """Those of calls with equal facts. All that the problems of its calls depend on has to be
        among these: shapes, strides, dtypes and devices of what is given and of weights.
        """
        key = (facts, engine.drops, torch.is_grad_enabled())
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MOST_FACTS:
                self._known = {}
            found = self._known.setdefault(key, Routes())
        return found

    def forget(self) -> None:
        self._known = {}


class Calls:
    """The calls of one run of a program."""

    __slots__ = ("_routes", "_session")

    def __init__(self, session: Session, routes: Routes) -> None:
        self._session, self._routes = session, routes

    def run(self, place: str, op: Op[Any, Any], inputs: Any) -> Any:
        """As engine.run. A place makes one kind of call in a run."""
        route = self._routes.get(place) or self.route(place, op, inputs)
        return engine.follow(route, op, inputs, self._session)

    def route(self, place: str, op: Op[Any, Any], inputs: Any) -> Route:
        """What `run` takes for these inputs."""
        route = self._routes.get(place)
        if route is None:
            route = engine.route(op, inputs, self._session)
            if route.lasts:
                self._routes[place] = route
        return route


class _Shielded(Calls):
    """Amid autocast, which would choose other dtypes for some of torch's operations."""

    __slots__ = ()

    def run(self, place: str, op: Op[Any, Any], inputs: Any) -> Any:
        with torch.autocast(inputs[0].device.type, enabled=False):
            return super().run(place, op, inputs)


def begin(session: Session, routes: Routes) -> Calls:
    """A run begins: no autocast that is on has a say in its calls."""
    return _Shielded(session, routes) if autocasts() else Calls(session, routes)


def _autocasts_before_2_4() -> bool:
    return torch.is_autocast_enabled() or torch.is_autocast_cpu_enabled()


autocasts: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", _autocasts_before_2_4)
"""Whether any is on."""
