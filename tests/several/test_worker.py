"""What a replica's process does by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lib_rocm_sd.cards.blueprint import UNET
from lib_rocm_sd.cards.memory import Shared
from lib_rocm_sd.cards.worker import CopiedUnet, Worker, _mirror, switches
from lib_rocm_sd.engine.session import Session


def test_a_step_that_runs_out_of_memory_there() -> None:
    """What the decoder keeps beside its weights is given back, and the step is tried again."""
    memory = Shared(1 << 16)
    opening = {"device": "cpu", "cache": None, "bytes": memory.size, "memory": memory.name}
    worker = Worker(opening, lambda number: None)
    done: list[str] = []

    class Full(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            done.append("step")
            if "release" not in done:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return x + 1

    worker.unet = CopiedUnet(Full(), Session(), None)
    message = {"kind": "call", "part": UNET, "inputs": [["x", "float32", [3], 0]], "out": 256}
    with pytest.raises(torch.OutOfMemoryError):
        worker.answer(message)
    worker.decoder = cast("Any", SimpleNamespace(release=lambda: done.append("release")))
    memory.tensor(0, (3,), torch.float32).fill_(2)
    assert worker.answer(message)["shape"] == [3] and done == ["step", "step", "release", "step"]
    assert memory.tensor(256, (3,), torch.float32).tolist() == [3.0] * 3


def test_a_switch_that_stands_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting this one imports torch's compiler, while a step of the host's waits."""
    calls: list[bool] = []
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", lambda mode, warn_only: calls.append(mode)
    )
    _mirror(switches())
    assert not calls
    _mirror({**switches(), "algorithms": True})
    assert calls == [True]
