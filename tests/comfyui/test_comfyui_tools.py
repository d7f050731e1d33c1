"""What measures a real ComfyUI: its workflows, and packages that are not there."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from lib_rocm_sd.hosts.comfyui import nodes
from tools import comfyui_speed
from tools.comfyui_start import Finder

WAYS = [way for start in comfyui_speed.STARTS for way in start.ways]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_each_ways_workflow_is_whole(way: Any) -> None:
    """Links lead to nodes, and our nodes have these inputs, with values that they offer."""
    made = comfyui_speed.workflow("SD 1.5:512x4", 20, way, 3)
    assert made["2"]["inputs"] == {"width": 512, "height": 512, "batch_size": 4}
    assert (made["1"]["inputs"]["kind"], made["3"]["inputs"]["seed"]) == ("SD 1.5", 3)
    for node in made.values():
        links = [value for value in node["inputs"].values() if isinstance(value, list)]
        assert {link[0] for link in links} <= set(made)
        kind: Any = nodes.CLASSES.get(node["class_type"])
        if kind is None:
            continue
        asked = kind.INPUT_TYPES()
        every = {**asked["required"], **asked.get("optional", {})}
        assert set(asked["required"]) <= set(node["inputs"]) <= set(every)
        for name, value in node["inputs"].items():
            assert not isinstance(every[name][0], list) or value in every[name][0]


def test_ways_are_chosen_by_parts_of_their_names() -> None:
    assert sum(len(ways) for _, ways in comfyui_speed.chosen("")) == len(WAYS)
    found = list(comfyui_speed.chosen("Performance,split"))
    assert [start.name for start, _ in found] == ["split", "ours"]
    assert [way.name for _, ways in found for way in ways] == [
        "ComfyUI, split attention",
        "ours: all, Performance",
    ]


def test_a_package_that_is_not_there_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder(["not_there_either"])])
    for name in ("not_there_either", "not_there_either.within", "not_there_either.within.it"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(name)
        assert isinstance(module.Anything, type)
        with pytest.raises(AttributeError):
            module.__version__  # noqa: B018
        monkeypatch.setitem(sys.modules, name, module)  # and is gone after the test
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("nothing_of_this_name")
