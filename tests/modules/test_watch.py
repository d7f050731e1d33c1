"""A watch over modules: what it notices, and what it does not mind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.modules.watch import Watch


class Part(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(Part(), nn.Linear(2, 2))
        self.mode = "plain"

    def forward(self, x: Any) -> Any:
        return self.part(x)


def _anything(*_: Any) -> None:
    return None


CHANGES: dict[str, Callable[[Whole], object]] = {
    "a forward on the instance": lambda m: setattr(m.part[1], "forward", _anything),
    "an inner forward on the root": lambda m: setattr(m, "_forward", _anything),
    "another class": lambda m: setattr(m.part[0], "__class__", Whole),
    "another child": lambda m: m.part.__setitem__(1, nn.Linear(2, 2)),
    "one child more": lambda m: m.part.append(nn.Linear(2, 2)),
    "a child that is gone": lambda m: setattr(m, "part", None),
    "a hook": lambda m: m.part[1].register_forward_hook(_anything),
    "a hook before": lambda m: m.part[0].register_forward_pre_hook(_anything),
    "a watched value": lambda m: setattr(m, "mode", "other"),
    "another attribute": lambda m: setattr(m.part[1], "lora_layer", 1),
}
UNMINDED: dict[str, Callable[[Whole], object]] = {
    "nothing": lambda m: None,
    "the root's forward": lambda m: setattr(m, "forward", _anything),
    "a hook on the root": lambda m: m.register_forward_hook(_anything),
    "a weight's values": lambda m: m.get_parameter("part.1.weight").data.add_(1),
    "a weight's dtype": lambda m: m.to(torch.float16),
    "the same value": lambda m: setattr(m, "mode", "plain"),
}


def watched() -> tuple[Whole, Watch]:
    module = Whole()
    return module, Watch(list(module.modules()), [(vars(module), "mode", module.mode)])


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_noticed(change: Callable[[Whole], object]) -> None:
    module, watch = watched()
    assert watch.same()
    change(module)
    assert not watch.same()


@pytest.mark.parametrize("change", UNMINDED.values(), ids=UNMINDED)
def test_what_is_not_minded(change: Callable[[Whole], object]) -> None:
    module, watch = watched()
    change(module)
    assert watch.same()


def test_another_forward_in_a_class_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, watch = watched()
    monkeypatch.setattr(Whole, "forward", lambda self, x: x)
    assert not watch.same()
    monkeypatch.undo()
    assert watch.same()
