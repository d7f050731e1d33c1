"""A team whose second card is a process on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd.cards import replica
from lib_rocm_sd.cards.replica import Limits, Made, Replica
from lib_rocm_sd.cards.shares import MEASURED, WARM
from lib_rocm_sd.cards.team import FIRST, SeveralStandIn, Team
from lib_rocm_sd.cards.worker import switches
from lib_rocm_sd.hosts.read.blueprint import Manner, Subject

CPU = torch.device("cpu")
LIMIT_S = 600.0
UNTIL_DIVIDED = 3 + WARM + MEASURED
_plain = replica.command


def await_answers(team: Team) -> None:
    """Until the replicas have answered what they were asked."""
    end = time.monotonic() + LIMIT_S
    for member in team.members:
        while member._replica is not None and not member.is_there:
            member.look()
            assert time.monotonic() < end
            time.sleep(0.005)


def command(plan: Path) -> list[str]:
    """Of a replica that does what `plan` says: see faulty.py."""
    found = _plain()
    start = found.index("-c") + 1
    found[start] = found[start].replace("lib_rocm_sd.cards.child", "tests.several.faulty")
    return [*found, str(plan)]


def inputs(rows: int = 2, side: int = 8, seed: int = 0) -> dict[str, torch.Tensor]:
    """What a step gives to the double's UNet."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    return {
        "x": draw(rows, 4, side, side),
        "timesteps": torch.full((rows,), 0.5),
        "context": draw(rows, 77, 24),
    }


class Teams:
    """A UNet whose calls a team of two computes. `ready` and `obstacle` are what a host says."""

    def __init__(self, unet: Any, start: Callable[[torch.device], Replica], cards: int = 1) -> None:
        self.unet = unet
        self.ready = self.obstacle = ""
        self.level = "Auto"
        self.team = Team(CPU, [CPU] * cards, start)
        self.subject = Subject(unet, lambda: Manner(self.level, 0, None, switches()))
        self.stand_in = SeveralStandIn(
            self.subject, self.team, lambda: self.obstacle, lambda leaves: self.ready
        )
        self.stand_in.put_in()
        self.team.begin()
        self.wait()

    @property
    def member(self) -> Any:
        return self.team.members[0]

    def wait(self) -> None:
        await_answers(self.team)

    def call(self, rows: int = 2, **more: Any) -> torch.Tensor:
        with torch.no_grad():
            made: torch.Tensor = self.unet(**inputs(rows, **more))
        self.wait()
        return made

    def alone(self, rows: int = 2, **more: Any) -> torch.Tensor:
        """What the UNet gives without a team."""
        with torch.no_grad():
            made: torch.Tensor = type(self.unet).forward(self.unet, **inputs(rows, **more))
        return made

    def divided(self, rows: int = 2, **more: Any) -> torch.Tensor:
        """A call that both compute, whatever is faster; those before it are measured."""
        self.warm(rows, **more)
        made = self.call(rows, **more)
        assert not self.team.why, self.team.why
        return made

    def warm(self, rows: int = 2, **more: Any) -> None:
        """Until the next call of this kind is divided."""
        for _ in range(UNTIL_DIVIDED + 1):
            self.call(rows, **more)
            if self.member.may(kind_of(rows, **more)) and self.team.why != FIRST:
                break
        self.prefer(rows, **more)

    def prefer(self, rows: int = 2, **more: Any) -> None:
        """Make what one card takes look slow."""
        known = self.team.shares.of(kind_of(rows, **more))
        whole = (rows, *[0] * len(self.team.members))
        known.calls[whole] = WARM + MEASURED
        known.times[whole] = 1e9
        known.speeds.clear()


class Played:
    """A replica without a process: its answers are there at once."""

    def __init__(self, unet: Any) -> None:
        self.unet, self.limits, self.free_bytes = deepcopy(unet), Limits(), None
        self.waits_for, self.pid, self.asked = "open", -1, 0.0
        self.fails: Exception | None = None
        self._given: Any = {}

    def poll(self) -> dict[str, Any]:
        return self.fetch(0.0)

    def fetch(self, limit_s: float) -> dict[str, Any]:
        self.waits_for = ""
        if self.fails is not None:
            raise self.fails
        return {"why": ""}

    def build(self, *_: Any) -> None:
        pass

    def fill(self, tensors: Any, places: Any, part: str) -> int:
        own = list(self.unet.parameters())
        with torch.no_grad():
            for place in places:
                own[place].copy_(tensors[place])
        return 0

    def begin(self, given: Any, out_bytes: int, asked: Any) -> None:
        self.waits_for, self._given = "call", given

    def made(self, answer: Any) -> Made:
        return Made(type(self.unet).forward(self.unet, **self._given), 1.0)

    def expect(self, expected: torch.Tensor) -> None:
        pass

    def has_expected(self) -> bool:
        return True

    def compare(self, answer: Any, most: float) -> None:
        self.waits_for = "compare"

    def close(self, wait: Any) -> None:
        pass


def kind_of(rows: int = 2, **more: Any) -> Any:
    from lib_rocm_sd.cards.team import Call

    return Call(inputs(rows, **more)).kind


def near(made: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within bfloat16."""
    difference = (made.double() - expected.double()).square().mean().sqrt()
    return float(difference / expected.double().square().mean().sqrt()) < 0.03
