"""A second card that fails: its part is computed here, so the result is whole, and it is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd.cards.replica import Limits, Replica
from tests.several.help import CPU, Teams, kind_of, near


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("memory", "cpu: out of memory on cpu"),
        ("error", "cpu: it failed: ValueError: a planted error"),
        ("shape", "cpu: its result is of another kind than this card's"),
    ],
)
def test_a_call_that_fails(team: Teams, plan: Path, fault: str, reason: str) -> None:
    team.warm()
    plan.write_text(f"call {fault}")
    assert torch.equal(team.call(), team.alone())
    assert team.team.why == reason
    plan.write_text("")
    assert torch.equal(team.call(), team.alone()) and team.team.why == reason
    assert near(team.divided(3), team.alone(3))  # another kind of call may go well


def test_a_wrong_first_result(team: Teams, plan: Path) -> None:
    """By kernels that only the host's card has tested, then by those that this one has, too."""
    plan.write_text("call wrong")
    for _ in range(4):
        team.call()
    team.prefer()
    assert torch.equal(team.call(), team.alone())
    assert team.team.why.startswith("cpu: its first result differs from this card's by 0.5")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("open unusable", "cpu: a planted reason"),
        ("open poor", "cpu: the UNet takes 0.0 GiB, and 0.0 GiB are free there"),
        ("build memory", "cpu: out of memory"),
        ("weights error", "cpu: ValueError: a planted error"),
    ],
)
def test_a_card_that_cannot_be_had(
    again: Any, unet: Any, plan: Path, fault: str, reason: str
) -> None:
    plan.write_text(fault)
    made = Teams(unet, again)
    for _ in range(3):
        assert torch.equal(made.call(), made.alone())
    assert made.team.why == reason and not made.member.is_there
    made.team.close()


@pytest.mark.slow
def test_a_process_that_dies_and_one_that_hangs(unet: Any, plan: Path) -> None:
    """The second time it stays away until somebody chooses it anew."""
    started: list[Replica] = []

    def start(device: torch.device) -> Replica:
        started.append(Replica(device, CPU, Limits(call_s=1.0), size=1 << 20))
        return started[-1]

    made = Teams(unet, start)
    made.warm()
    plan.write_text("call die")
    assert torch.equal(made.call(), made.alone())
    assert made.team.why == "cpu: its process ended with status 7"
    assert torch.equal(made.call(), made.alone())
    plan.write_text("")
    made.team.begin()
    made.wait()
    made.warm()
    plan.write_text("call hang")
    assert torch.equal(made.call(), made.alone())
    assert made.team.why == "cpu: no answer to 'call' within 1 s"
    made.team.begin()
    assert len(started) == 2 and not made.member.is_there
    assert torch.equal(made.call(), made.alone())
    assert not made.member.may(kind_of())
    made.team.close()


def test_an_answer_to_something_else(
    again: Any, unet: Any, plan: Path, shared: Replica, monkeypatch: Any
) -> None:
    """Nothing but what was asked is taken for an answer."""
    killed: list[int] = []
    monkeypatch.setattr(shared._link, "kill", lambda: killed.append(1))
    made = Teams(unet, again)
    made.warm()
    plan.write_text("call number")
    assert torch.equal(made.call(), made.alone())
    assert made.team.why == "cpu: its process answers something that was not asked" and killed
