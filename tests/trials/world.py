"""A program behind its gate, on the stand-in card."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.trials.conductor import Conductor
from lib_rocm_sd.trials.gate import Gate
from lib_rocm_sd.trials.journal import Journal
from lib_rocm_sd.trials.link import Link
from lib_rocm_sd.trials.place import Place
from tests.ops.toy_op import CPU, GFX1100, User
from tests.runtime.driver_doubles import ScaleParams
from tests.trials import scaling
from tests.trials.scaling import SCALING, Inputs
from tests.waiting import WAIT_S

X = torch.arange(1024.0)


class Launching:
    """A launch in this process; `error` is raised by it, once."""

    def __init__(self) -> None:
        self.count = 0
        self.error: Exception | None = None
        self.during: Callable[[], None] = lambda: None

    def __call__(self, spec: KernelSpec, grid: int, block: int, params: Any, device: Any) -> None:
        self.count += 1
        self.during()
        error, self.error = self.error, None
        if error is not None:
            raise error
        p = ScaleParams.from_buffer_copy(bytes(params))
        x = (ctypes.c_float * p.count).from_address(p.x)
        out = (ctypes.c_float * p.count).from_address(p.out)
        for place in range(p.count):
            out[place] = p.a * x[place] + x[place ^ 1]


class World:
    """An engine with a gate, whose card is the stand-in's."""

    def __init__(self, place: Place, journal: Path, class_limit_s: float = WAIT_S) -> None:
        self.class_limit_s = class_limit_s
        self.launch = Launching()
        self.said: list[str] = []
        self.renewed = 0
        self.busy = False
        self.children = 0
        self.links: list[Link] = []
        self.place = place
        self.journal = Journal(journal)
        self.user = User(
            Engine(
                identify=lambda device: replace(GFX1100, gfx=place.arch.gfx, arch=place.arch),
                launcher=lambda device, arch: self.launch,
                free=lambda device, headroom: 1 << 40,
            )
        )
        self.gate = Gate(
            renew=self._renew,
            say=self.said.append,
            busy=lambda: self.busy,
            journal=self.journal,
            place_of=lambda device, launch: place,
            conductor=self._conductor,
        )
        self.started = self.gate.start()
        self.user.engine.gate = self.gate

    def _renew(self) -> None:
        self.renewed += 1
        self.user.engine.renew()

    def _conductor(self, place: Place, **how: Any) -> Conductor:
        self.children += 1
        return Conductor(place, spawn=self._spawn, class_limit_s=self.class_limit_s, **how)

    def _spawn(self) -> Link:
        self.links.append(Link())
        return self.links[-1]

    def run(self, factor: float = 2.0) -> str:
        """The variant that computed a call; it was right."""
        self.user.session.report.begin()
        out = self.user.run(SCALING, Inputs(X, factor))
        assert torch.equal(out, X * factor + scaling.swapped(X))
        rows = self.user.session.report.snapshot()["rows"]
        (variant,) = {row["variant"] for row in rows if row["calls"]}
        return str(variant)

    def why(self, factor: float = 2.0) -> str:
        plan = self.user.plan(scaling.Scaling(1024, factor), CPU, SCALING)
        return "; ".join(plan.refusals["rocm_sd"])

    def settled(self) -> None:
        assert self.gate.wait(600)


def again(before: World, *software: str) -> World:
    """The same machine at the next start of the program."""
    place = scaling.place(Path(before.place.library), *software)
    return World(place, before.journal._folder or Path())


def key_of(world: World, factor: float = 2.0) -> str:
    subject = scaling.subject(factor)
    return subject.key(world.place, subject.digests(world.place.arch, {}))
