"""Replacing attributes and putting them back, whoever else does so."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lib_rocm_sd.modules.patches import ABSENT, displaced_by, named, put, take


def theirs(*args: Any) -> str:
    return "theirs"


def ours(*args: Any) -> str:
    return "ours"


class Base:
    def forward(self) -> str:
        return "base"


class Derived(Base):
    pass


def test_a_class_gets_its_own_function_back() -> None:
    before = vars(Base)["forward"]
    patch = put(Base, "forward", ours)
    assert Base().forward() == "ours"
    assert displaced_by(patch) is None
    assert take(patch)
    assert vars(Base)["forward"] is before
    assert not take(patch)


def test_what_is_inherited_is_inherited_again() -> None:
    patch = put(Derived, "forward", ours)
    assert take(patch)
    assert "forward" not in vars(Derived)
    assert Derived().forward() == "base"


@pytest.mark.parametrize("own", [True, False])
def test_an_instance(own: bool) -> None:
    module: Any = torch.nn.Linear(2, 2)
    if own:
        module.forward = theirs
    patch = put(module, "forward", ours)
    assert module(None) == "ours"
    assert take(patch)
    assert vars(module).get("forward") is (theirs if own else None)


def test_a_static_method_stays_one() -> None:
    class Host:
        @staticmethod
        def speak() -> str:
            return "host"

    before = vars(Host)["speak"]
    assert take(put(Host, "speak", ours))
    assert vars(Host)["speak"] is before
    assert Host().speak() == "host"


def test_who_came_after_us_stays() -> None:
    module: Any = torch.nn.Linear(2, 2)
    patch = put(module, "forward", ours)
    module.forward = theirs
    assert displaced_by(patch) is theirs
    assert not take(patch)
    assert module.forward is theirs
    module.forward = ours
    assert displaced_by(patch) is None
    assert take(patch)


def test_who_took_us_away() -> None:
    host = ModuleType("host")
    patch = put(host, "speak", ours)
    del host.speak
    assert displaced_by(patch) is ABSENT
    assert not take(patch)
    patch = put(Derived, "forward", ours)
    del Derived.forward
    assert displaced_by(patch) is Base.forward


def test_names_for_people(tmp_path: Path) -> None:
    assert named(theirs) == "theirs of test_patches.py"
    assert named(functools.wraps(theirs)(lambda: None)) == "<lambda> of test_patches.py"
    assert named(Base().forward) == "forward of test_patches.py"
    assert named(functools.partial(theirs)) == "theirs of test_patches.py"
    script = tmp_path / "extensions" / "sd-webui-other" / "scripts" / "other.py"
    found: dict[str, Any] = {}
    exec(compile("def hacked(self): pass", str(script), "exec"), found)
    assert named(found["hacked"]) == "hacked of the extension sd-webui-other"
