"""A watch over modules: what it notices, and what it does not mind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as of_all

from lib_rocm_sd.modules.watch import Watch


class Part(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


class Processor:
    def __call__(self, x: Any) -> Any:
        return x


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(Part(), nn.Linear(2, 2), nn.Conv2d(2, 2, 1), nn.SiLU())
        # As somebody leaves it who has put back what was there before.
        self.part[0].forward = self.part[0].forward
        self.more = nn.ModuleDict({"one": Part()})
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
    "another forward where one was put back": lambda m: setattr(m.part[0], "forward", _anything),
    "a forward that became another attribute": lambda m: vars(m.part[0]).update(
        a=vars(m.part[0]).pop("forward")
    ),
    "another inner forward": lambda m: setattr(m.part[2], "_conv_forward", _anything),
    "a hook on an activation": lambda m: m.part[3].register_forward_hook(_anything),
    "hooks in another dict": lambda m: setattr(m.part[1], "_forward_hooks", {1: _anything}),
    "another attribute": lambda m: setattr(m.part[1], "lora_layer", 1),
    "another child of a dict of modules": lambda m: m.more.update({"one": Part()}),
    "one child more of a dict of modules": lambda m: m.more.update({"two": Part()}),
    "a hook beneath a dict of modules": lambda m: m.more["one"].register_forward_hook(_anything),
}
UNMINDED: dict[str, Callable[[Whole], object]] = {
    "nothing": lambda m: None,
    "the root's forward": lambda m: setattr(m, "forward", _anything),
    "a hook on the root": lambda m: m.register_forward_hook(_anything),
    "a weight's values": lambda m: m.get_parameter("part.1.weight").data.add_(1),
    "a weight's dtype": lambda m: m.to(torch.float16),
    "the same value": lambda m: setattr(m, "mode", "plain"),
    "a hook on what is never called": lambda m: m.more.register_forward_hook(_anything),
}


def watched() -> tuple[Whole, Watch]:
    module = Whole()
    watched = [(vars(module), "mode", module.mode)]
    return module, Watch(list(module.modules()), watched, [(Processor, "__call__")])


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


CODE: dict[str, tuple[Any, str]] = {
    "the root's forward": (Whole, "forward"),
    "a leaf's forward": (nn.Linear, "forward"),
    "an activation's forward": (nn.SiLU, "forward"),
    "an inner forward": (nn.Conv2d, "_conv_forward"),
    "the call of every module": (nn.Module, "__call__"),
    "what that calls": (nn.Module, "_call_impl"),
    "a function that forwards call": (nn.functional, "silu"),
    "a watched function": (Processor, "__call__"),
}


@pytest.mark.parametrize(("owner", "name"), CODE.values(), ids=CODE)
def test_other_code_of_a_class_is_noticed(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, watch = watched()
    monkeypatch.setattr(owner, name, lambda *given: None)
    assert not watch.same()
    monkeypatch.undo()
    assert watch.same()


def test_a_hook_is_noticed_beside_another_and_in_its_place() -> None:
    """What reads a module may allow some: a UNet's attention with hooks is called as it is."""
    module = Whole()
    first = module.part[1].register_forward_hook(_anything)
    watch = Watch(list(module.modules()))
    assert watch.same()
    second = module.part[3].register_forward_pre_hook(_anything)
    assert not watch.same()
    first.remove()
    assert not watch.same()
    second.remove()
    module.part[1].register_forward_hook(_anything)
    assert watch.same()


@pytest.mark.parametrize(
    "register", [of_all.register_module_forward_hook, of_all.register_module_forward_pre_hook]
)
def test_a_hook_on_all_modules_is_noticed(register: Callable[[Any], Any]) -> None:
    _, watch = watched()
    handle = register(_anything)
    try:
        assert not watch.same()
    finally:
        handle.remove()
    assert watch.same()
