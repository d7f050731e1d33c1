"""Variants are asked when their turn comes, and the others when somebody looks."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.ops.toy_op import GFX1100, Doubler, X, engine_of, op_of


@dataclass(eq=False)
class Asked(Doubler):
    """Counts what it is asked."""

    asked: Counter[str] = field(default_factory=Counter)

    def refusals(self, arch: Any, problem: Any) -> list[str]:
        self.asked["refusals"] += 1
        return super().refusals(arch, problem)

    def input_refusals(self, inputs: Any) -> list[str]:
        self.asked["input_refusals"] += 1
        return super().input_refusals(inputs)

    def workspace(self, problem: Any) -> int:
        self.asked["workspace"] += 1
        return super().workspace(problem)

    def defaults(self, arch: Any, problem: Any) -> Any:
        self.asked["defaults"] += 1
        return super().defaults(arch, problem)

    def notes(self, arch: Any, problem: Any) -> list[str]:
        self.asked["notes"] += 1
        return super().notes(arch, problem)


EACH = {"refusals": 1, "input_refusals": 1, "workspace": 1, "defaults": 1}
"""What one plan asks of what it takes."""


def test_a_plan_asks_what_it_takes_and_nobody_behind() -> None:
    first, behind = Asked("first", 9), Asked("behind", 5)
    engine, report = engine_of()
    engine.run(op_of(first, behind), X)
    assert first.asked == {**EACH, "notes": 1}
    assert behind.asked == {}
    (row,) = report.snapshot()["rows"]
    assert row["reasons"] == {"behind": ["comes after first"]}
    assert behind.asked == {"refusals": 1, "workspace": 1}
    assert report.snapshot()["rows"] == [row]
    assert behind.asked == {"refusals": 1, "workspace": 1}


def test_another_size_of_a_class_asks_for_no_notes() -> None:
    first = Asked("first", 9, noted=("the table is ignored",))
    engine, report = engine_of()
    op = op_of(first)
    engine.run(op, X)
    first.asked.clear()
    engine.run(op, X[:5])
    assert first.asked == EACH
    assert report.snapshot()["events"] == ["the table is ignored"]
    engine.run(op, torch.zeros(10, 7))
    assert first.asked["notes"] == 1


def test_what_refused_is_told_with_all_its_reasons() -> None:
    first = Asked("first", 9, refuses=["too wide"], refuses_inputs=lambda x: ["and dense"])
    engine, report = engine_of()
    engine.run(op_of(first, Asked("second")), X)
    (row,) = report.snapshot()["rows"]
    assert row["reasons"] == {"first": ["too wide", "and dense"]}


def test_a_plan_that_nobody_looked_at_keeps_no_tensors() -> None:
    first, behind = Asked("first", 9), Asked("behind", 5)
    engine, report = engine_of()
    x = torch.ones(10, 8)
    engine.run(op_of(first, behind), x)
    kept = weakref.ref(x)
    del x
    gc.collect()
    assert kept() is None
    assert report.snapshot()["rows"][0]["reasons"] == {"behind": ["comes after first"]}
    assert behind.asked["input_refusals"] == 0


def test_a_launcher_is_made_when_a_plan_is_not_when_somebody_looks() -> None:
    made = []

    def launcher(device: Any, arch: Any) -> Any:
        made.append(device)
        return lambda *args, **how: None

    engine, report = engine_of(GFX1100, launcher=launcher)
    engine.run(op_of(Asked("theirs", 9), Asked("ours", 5, ours=True)), X)
    assert len(made) == 1
    report.snapshot()
    assert len(made) == 1
