"""A toy op, y = 2 x, with variants that can be told to misbehave: for tests of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lib_rocm_sd.arch import Arch, table
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.engine.planner import VariantPlan
from lib_rocm_sd.engine.selftest import Check
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.base import Call, Launch, Op, Variant
from lib_rocm_sd.ops.keys import key_of
from lib_rocm_sd.report import Report
from tests.clock import Clock

CPU = torch.device("cpu")
X = torch.arange(80.0).reshape(10, 8)
GFX1100 = DeviceInfo(0, "Fake RX 7900 XTX", "hip", "gfx1100", table()["gfx1100"])
NO_GPU = DeviceInfo(0, "CPU", "cpu", None, None, ("no GPU: this is the CPU",))


@dataclass(frozen=True)
class Doubling:
    """x has shape (rows, width); `width` is the class."""

    rows: int
    width: int
    dtype: str = "float32"


@dataclass(frozen=True)
class Tile:
    size: int


class Inputs(NamedTuple):
    x: torch.Tensor


def problem_of(inputs: Inputs) -> Doubling:
    (x,) = inputs
    if x.ndim != 2:
        raise ValueError(f"x must be (rows, width): {tuple(x.shape)}")
    return Doubling(x.shape[0], x.shape[1], str(x.dtype).removeprefix("torch."))


def make_inputs(problem: Doubling, device: torch.device, seed: int) -> Inputs:
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn((problem.rows, problem.width), generator=generator)
    return Inputs(x.to(getattr(torch, problem.dtype)).to(device))


def test_problems(problem: Doubling) -> tuple[Doubling, ...]:
    return (
        Doubling(3, problem.width, problem.dtype),
        Doubling(4 + problem.rows % 4, problem.width, problem.dtype),
    )


@dataclass(eq=False)
class Doubler(Variant[Doubling, Inputs]):
    """Doubles by `work`, and keeps what it was given in `seen`."""

    name: str
    preference: int = 0
    ours: bool = False
    work: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda x: x * 2)
    refuses: Sequence[str] = ()
    refuses_inputs: Callable[[torch.Tensor], list[str]] = staticmethod(lambda x: [])
    workspace_bytes: int = 0
    tiles: Sequence[Any] = (None,)
    safe: Any = None
    noted: Sequence[str] = ()
    by_tile: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    seen: list[tuple[Any, ...]] = field(default_factory=list)

    def refusals(self, arch: Arch | None, problem: Doubling) -> list[str]:
        return list(self.refuses)

    def input_refusals(self, inputs: Inputs) -> list[str]:
        return self.refuses_inputs(inputs[0])

    def workspace(self, problem: Doubling) -> int:
        return self.workspace_bytes

    def configs(self, arch: Arch | None, problem: Doubling) -> Sequence[Any]:
        return self.tiles

    def defaults(self, arch: Arch | None, problem: Doubling) -> Sequence[Any]:
        return list(dict.fromkeys((self.tiles[0], self.safe or self.tiles[0])))

    def notes(self, arch: Arch | None, problem: Doubling) -> list[str]:
        return list(self.noted)

    def run(self, call: Call[Doubling, Inputs]) -> Any:
        config, inputs = call.config, call.inputs
        self.seen.append((call.launch, config, tuple(inputs[0].shape)))
        assert call.problem == problem_of(inputs)
        return self.by_tile.get(config, self.work)(inputs[0])

    def calls(self, rows: int) -> int:
        """How often it ran on inputs with this many rows."""
        return sum(shape[0] == rows for _, _, shape in self.seen)


def op_of(*variants: Variant[Doubling, Inputs], name: str = "doubling") -> Op[Doubling, Inputs]:
    return Op(
        name=name,
        family="toy",
        title=name.capitalize(),
        variants=variants,
        problem_of=problem_of,
        key_of=key_of,
        reference=lambda inputs: inputs[0].double() * 2,
        make_inputs=make_inputs,
        tolerance=lambda problem: 1e-6,
        output_shape=lambda problem: (problem.rows, problem.width),
        test_problems=test_problems,
        usual=(("usual", Doubling(40, 8)),),
    )


def engine_of(
    info: DeviceInfo = NO_GPU,
    launcher: Callable[[torch.device, Arch], Launch] = lambda device, arch: lambda *a, **k: None,
    free: int = 1 << 40,
) -> tuple[User, Report]:
    engine = Engine(
        identify=lambda device: info, launcher=launcher, free=lambda device, headroom: free
    )
    user = User(engine)
    return user, user.session.report


class User:
    """An engine, called in one session with a report of its own, as a host calls it."""

    def __init__(self, engine: Engine, level: str = "Auto") -> None:
        self.engine = engine
        self.session = Session.of(level, report=Report())

    def set_level(self, level: str) -> None:
        """Go on at another level, with the same report."""
        self.session = Session.of(level, report=self.session.report)

    def run(self, op: Op[Any, Any], inputs: Any) -> Any:
        """`inputs` may be the tensor of the toy op."""
        inputs = Inputs(inputs) if isinstance(inputs, torch.Tensor) else inputs
        return self.engine.run(op, inputs, self.session)

    def plan(self, problem: Any, device: torch.device, op: Op[Any, Any] = ATTENTION) -> VariantPlan:
        return self.engine.plan(problem, device, op, self.session)

    def usable(self, device: torch.device, op: Op[Any, Any] = ATTENTION) -> list[str]:
        return self.engine.usable(device, op, self.session)

    def checks(
        self, problem: Any, device: torch.device, op: Op[Any, Any] = ATTENTION
    ) -> dict[str, Check]:
        return self.engine.checks(problem, device, op, self.session)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("engine", "session"):
            super().__setattr__(name, value)
        else:
            setattr(self.engine, name, value)


def raising(error: BaseException, after: int = 0) -> Callable[[torch.Tensor], torch.Tensor]:
    """Works `after` times, then raises."""
    left = [after]

    def work(x: torch.Tensor) -> torch.Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise error
        return x * 2

    return work


def taking(seconds: float, clock: Clock) -> Callable[[torch.Tensor], torch.Tensor]:
    def work(x: torch.Tensor) -> torch.Tensor:
        clock.turn(seconds)
        return x * 2

    return work


SELF_TESTS = 2
"""How many test problems X's problem has."""
