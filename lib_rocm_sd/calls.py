"""Calls that a program makes again and again, each from its own place: looked at once, then made.

functional.py looks at the shapes, strides and dtypes of each call, and finds its route by them. A
block of a UNet makes ten calls, all of whose shapes follow from what it is given and from its
weights. So these are its facts, and while they stay the same, a place keeps its route.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.route import Route
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.graphs.memory import Into, Result
from lib_rocm_sd.graphs.programs import Compute, DeviceGraphs, Graphs, Recording
from lib_rocm_sd.ops.base import Call, Op

MOST_FACTS = 8
"""Most sets of facts kept per program: a sampler alternates between picture and prompt sizes."""
MOST_RECORDINGS = 2
"""Most recordings of a program with the same facts: the prompt and the negative prompt may differ
in length.
"""
RUNS_BEFORE_RECORDING = 1
"""Runs of a program with the same facts before it is recorded: what runs once is not worth a
recording. A failed recording is followed by as many.
"""


class Routes(dict[str, Route]):
    """By place. `left`: why the program is better left to others; None where nobody has looked.
    `runs`: how often it was computed launch by launch. `recordings`: of its launches, by what they
    read beside what they are given. `moves`: what of that, or of what it makes, is not always in
    the same place; `settled`: what somebody else makes and seems to be; `unsettled`: and seemed to
    be before it moved. `result`: where it was recorded last. Equal only to itself.
    """

    __slots__ = (
        *("__weakref__", "left", "moves", "recordings", "result", "runs"),
        *("settled", "unsettled"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.left: str | None = None
        self.runs = 0
        self.recordings: dict[tuple[Any, ...], Recording] = {}
        self.moves: frozenset[str] = frozenset()
        self.settled: frozenset[str] = frozenset()
        self.unsettled: frozenset[str] = frozenset()
        self.result: Result | None = None

    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]


class Places:
    """What the places of one program lead to, by its facts. Threads may share it."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Routes] = {}
        self._drops = engine.drops

    def of(self, facts: Hashable) -> Routes:
        """Those of calls with equal facts. All that the problems of its calls depend on has to be
        among these: shapes, strides, dtypes and devices of what is given and of weights.
        """
        key = (facts, engine.drops, torch.is_grad_enabled())
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MOST_FACTS or self._drops != engine.drops:
                self._known, self._drops = {}, engine.drops
            found = self._known.setdefault(key, Routes())
        return found

    def forget(self) -> None:
        self._known = {}


class Calls:
    """The calls of one run of a program. `divided`: the rows that it has of its images, where
    other processes have the others (unet/divided.py).
    """

    __slots__ = ("_graphs", "_routes", "_session", "divided")

    def __init__(
        self, session: Session, routes: Routes, graphs: Graphs | None = None, divided: Any = None
    ) -> None:
        self._session, self._routes, self._graphs = session, routes, graphs
        self.divided = divided

    def run(self, place: str, op: Op[Any, Any], inputs: Any) -> Any:
        """As engine.run. A place makes one kind of call in a run."""
        route = self._routes.get(place) or self.route(place, op, inputs)
        return engine.follow(route, op, inputs, self._session)

    def known(self, place: str) -> Route | None:
        """What `run` takes, where that is settled: so that nothing need be posed to ask it."""
        return self._routes.get(place)

    def route(self, place: str, op: Op[Any, Any], inputs: Any) -> Route:
        """What `run` takes for these inputs."""
        route = self._routes.get(place)
        if route is None:
            route = engine.route(op, inputs, self._session)
            if route.lasts:
                self._routes[place] = route
        return route

    def recorded(
        self, compute: Compute, given: Mapping[str, torch.Tensor], held: tuple[Any, ...] = ()
    ) -> torch.Tensor:
        """`compute(calls, **given)`: all of the program's calls, by a graph from the third time on.

        It depends on nothing that may change but the facts, `given`, and which objects, or weak
        references to objects, `held` are.
        """
        graphs, routes = self.graphs_of(next(iter(given.values())).device), self._routes
        if graphs is None:
            return compute(self, **given)
        recording = routes.recordings.get(held)
        if recording is not None:
            replayed = graphs.replay(recording, given)
            if held not in routes.recordings:  # to be made anew
                routes.runs = RUNS_BEFORE_RECORDING
            elif replayed is None:
                return compute(self, **given)
            if replayed is not None:
                return replayed
        routes.runs, drops = routes.runs + 1, engine.drops
        made = compute(self, **given)
        due = routes.runs > RUNS_BEFORE_RECORDING and drops == engine.drops
        if due and graphs.may_record():
            if len(routes.recordings) >= MOST_RECORDINGS:
                routes.recordings = {}
            work = partial(_followed, routes, compute)
            routes.runs = 0
            return graphs.record(work, held, given, made, routes)
        return made

    def graphs_of(self, device: torch.device) -> DeviceGraphs | None:
        """Where a graph may compute this program now; None where it is launched one by one."""
        if self._graphs is None or torch.is_grad_enabled():
            return None
        found = self._graphs.of(device)
        return found if found is not None and found.is_here else None

    def of(self, routes: Routes) -> Calls:
        """Those of another program in the same run, as a part of it."""
        return type(self)(self._session, routes, divided=self.divided)


class _Kept(Calls):
    """Calls whose routes are known, and of which only the launches count. The last of them makes
    its result in `into`, if it can.
    """

    __slots__ = ("_into", "_last", "rows")

    def __init__(self, routes: Routes, rows: list[Any], into: torch.Tensor | None = None) -> None:
        self._routes, self.rows, self._into, self.divided = routes, rows, into, None
        self._last = next(reversed(routes), None)

    def run(self, place: str, op: Op[Any, Any], inputs: Any) -> Any:
        route = self._routes[place]
        self.rows.append(route.row)
        if self._into is None or place != self._last:
            return route.run(Call(route.problem, inputs, route.launch, route.config))
        with Into(self._into):
            return route.run(Call(route.problem, inputs, route.launch, route.config))

    def route(self, place: str, op: Op[Any, Any], inputs: Any) -> Route:
        return self._routes[place]

    def of(self, routes: Routes) -> Calls:
        return _Kept(routes, self.rows)


def _followed(
    routes: Routes, compute: Compute, into: torch.Tensor, **given: torch.Tensor
) -> tuple[torch.Tensor, list[Any]]:
    calls = _Kept(routes, [], into)
    return compute(calls, **given), calls.rows


class _Shielded(Calls):
    """Amid autocast, which would choose other dtypes for some of torch's operations."""

    __slots__ = ()

    def run(self, place: str, op: Op[Any, Any], inputs: Any) -> Any:
        with shielded(inputs[0].device):
            return super().run(place, op, inputs)

    def route(self, place: str, op: Op[Any, Any], inputs: Any) -> Route:
        with shielded(inputs[0].device):
            return super().route(place, op, inputs)


def begin(
    session: Session, routes: Routes, graphs: Graphs | None = None, divided: Any = None
) -> Calls:
    """A run begins: no autocast that is on has a say in its calls."""
    return (_Shielded if autocasts() else Calls)(session, routes, graphs, divided)


autocasts: Callable[[], bool] = getattr(
    torch._C,
    "_is_any_autocast_enabled",  # torch 2.4 and newer
    lambda: torch.is_autocast_enabled() or torch.is_autocast_cpu_enabled(),
)
"""Whether any is on."""


def shielded(device: torch.device) -> AbstractContextManager[Any]:
    """Within it no autocast has a say."""
    return torch.autocast(device.type, enabled=False) if autocasts() else nullcontext()
