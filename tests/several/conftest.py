"""UNets of the WebUI's double, and one replica on the CPU that many tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from lib_rocm_sd.cards import card, replica
from lib_rocm_sd.cards.replica import Limits, Replica
from tests import doubles
from tests.several.help import CPU, Teams, command


@pytest.fixture
def unet() -> Any:
    """ldm's, in bfloat16, at rest."""
    torch.manual_seed(3)
    made = doubles.module_of(doubles.UNET).UNetModel()
    made = made.eval().requires_grad_(False).to(torch.bfloat16)
    made.dtype = torch.bfloat16
    return made


@pytest.fixture(scope="package")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What happens in replicas: see faulty.py."""
    path = tmp_path_factory.mktemp("replica") / "plan"
    path.write_text("")
    return path


@pytest.fixture(autouse=True)
def fine(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas do as they should, until a test says otherwise."""
    plan.write_text("")
    monkeypatch.setattr(replica, "command", lambda: command(plan))
    monkeypatch.setattr(card, "MOST_SPENT_S", 1e9)  # machines of tests are slow


@pytest.fixture(scope="package")
def shared(plan: Path) -> Iterator[Replica]:
    """One process for all tests that do not end it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "command", lambda: command(plan))
        made = Replica(CPU, CPU, Limits(call_s=60.0), size=1 << 20)
        made.fetch(120.0)
        close = made.close
        patch.setattr(made, "close", lambda wait: wait())
        yield made
        close()


@pytest.fixture
def again(shared: Replica) -> Callable[[torch.device], Replica]:
    """Starts that process as if it were a new one."""

    def start(device: torch.device) -> Replica:
        if shared.waits_for:
            shared.fetch(60.0)
        shared._ask("open")
        return shared

    return start


@pytest.fixture(name="team")
def the_team(again: Callable[[torch.device], Replica], unet: Any) -> Iterator[Teams]:
    made = Teams(unet, again)
    yield made
    made.team.close()
