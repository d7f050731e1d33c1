"""What a replica's process does by itself."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lib_rocm_sd import first_trials
from lib_rocm_sd.cards import worker
from lib_rocm_sd.cards.memory import Shared
from lib_rocm_sd.cards.replica import Limits, kind_of
from lib_rocm_sd.cards.shares import WARM
from lib_rocm_sd.cards.worker import CopiedUnet, Worker, _mirror, switches
from lib_rocm_sd.engine import selftest
from lib_rocm_sd.engine.engine import Engine, engine
from lib_rocm_sd.engine.selftest import Check
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts.read.blueprint import UNET
from lib_rocm_sd.ops.registry import op_named


def opened() -> tuple[Shared, Worker]:
    """A worker on the CPU, and the memory that it shares."""
    memory = Shared(1 << 16)
    opening = {"device": "cpu", "cache": None, "bytes": memory.size, "memory": memory.name}
    return memory, Worker(opening, lambda number: None)


@pytest.mark.parametrize("home", ["gfx1100", "gfx1030"])
def test_a_card_of_another_kind_is_prepared_before_a_picture_needs_it(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    gate = SimpleNamespace(
        expect=lambda device, launch, classes: asked.append(classes), wait=asked.append
    )
    monkeypatch.setattr(worker, "put_before", lambda engine, say, busy: gate)
    monkeypatch.setattr(worker, "kind_of", lambda device: ["hip", "gfx1100", "a card"])
    monkeypatch.setattr(engine, "launcher", lambda device: None)
    _, made = opened()
    made._prepare(["hip", home, "a card"])
    is_other = home != "gfx1100"
    assert asked == [first_trials.all_classes, worker.PREPARE_S] * is_other
    assert Limits().start_s > worker.PREPARE_S


def test_a_step_that_runs_out_of_memory_there() -> None:
    """What the decoder keeps beside its weights is given back, and the step is tried again."""
    memory, worker = opened()
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


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_result_that_is_right_is_rehearsed(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is not is to be made again, by kernels that this card has tested, too."""
    memory, worker = opened()
    calls: list[int] = []

    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(len(x))
            return 2 * x

    worker.unet = CopiedUnet(Double(), Session(), None)
    trusted: list[Any] = []
    monkeypatch.setattr(engine, "trust", lambda passed: trusted.append(list(passed)))
    worker._trust([["an op"]])
    memory.tensor(0, (3,), torch.float32).copy_(torch.tensor([1.0, 2.0, float("inf")]))
    message = {"kind": "call", "part": UNET, "inputs": [["x", "float32", [3], 0]], "out": 256}
    worker.answer(message)
    memory.tensor(512, (3,), torch.float32).copy_(
        torch.tensor([2.0 * factor, 4.0 * factor, float("inf")])
    )
    where = {"result": [256, "float32", [3]], "expected": [512, "float32", [3]], "most": 0.01}
    answer = worker.answer({"kind": "compare", **where})
    if factor == 1.0:
        assert answer == {"kind": "compared", "why": "", "again": False}
        assert calls == [3] * (1 + WARM) and trusted == [[("an op",)]]
        return
    assert answer["why"] == "its first result differs from this card's by 0.33 (rms)"
    assert answer["again"] and calls == [3] and trusted[-1] == []
    assert not worker.answer({"kind": "compare", **where})["again"]


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


def test_what_passed_on_the_hosts_card_is_not_tested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card of its kind; on another one it is."""
    op = op_named("linear")
    assert op is not None
    problem, cpu = op.usual[0][1], torch.device("cpu")
    host, alike, other = Engine(), Engine(), Engine()
    plan = host.plan(problem, cpu, op)
    passed = json.loads(json.dumps(host.passed(cpu)))
    assert passed and not other.passed(cpu)
    tests: list[Any] = []

    def check(*how: Any) -> Check:
        tests.append(how)
        return Check(0.0, 1.0)

    monkeypatch.setattr(selftest, "check", check)
    alike.trust(map(tuple, passed))
    assert alike.plan(problem, cpu, op).variant is plan.variant and not tests
    other.plan(problem, cpu, op)
    assert tests


@pytest.mark.parametrize("same", [True, False])
def test_a_replica_trusts_a_card_of_its_kind(same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, worker = opened()
    trusted: list[Any] = []
    monkeypatch.setattr(engine, "trust", lambda passed: trusted.extend(passed))
    monkeypatch.setattr("lib_rocm_sd.cards.worker.build", lambda *plan: torch.nn.Identity())
    kind = kind_of(torch.device("cpu")) if same else ["hip", "gfx1100", "a card"]
    plan = {"rows": [], "packages": {}, "kind": kind, "passed": [["an op", "a", "b", "c"]]}
    text = json.dumps(plan).encode()
    raw = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    memory.tensor(0, raw.shape, torch.uint8).copy_(raw)
    more = {"level": "Auto", "headroom": 0, "graphs": None, "switches": switches()}
    worker.answer({"kind": "build", "part": UNET, "bytes": len(text), **more})
    assert trusted == ([("an op", "a", "b", "c")] if same else [])
