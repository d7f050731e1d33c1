"""What tries features in a real ComfyUI: its workflows, and what it judges."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib_rocm_sd.hosts.comfyui import nodes
from tools.comfyui_matrix import __main__ as matrix
from tools.comfyui_matrix.rows import FIRST, LAST, ROWS, WITHOUT, Hole, Row, Way, workflow

STATUS = """Ours.
UNet, residual blocks: 8 of 8 are ours
UNet, transformer blocks: 3 of 7 are ours
  4 x a patch
attention: 12 calls
  not a reason"""


def within(thing: Any) -> Iterator[Any]:
    yield thing
    if isinstance(thing, (dict, list)):
        for item in thing.values() if isinstance(thing, dict) else thing:
            yield from within(item)


@pytest.mark.parametrize("way", [WITHOUT, FIRST, LAST], ids=lambda way: way.name)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_workflow_is_whole(row: Row, way: Way) -> None:
    """Links lead to nodes, no hole is left, and our nodes have values that they offer."""
    made = workflow(row, way, "SD 1.5", 512, 4)
    assert not any(isinstance(item, Hole) for item in within(made))
    links = [link for node in made.values() for link in node["inputs"].values()]
    assert {link[0] for link in links if isinstance(link, list)} <= set(made)
    ours = [node for node in made.values() if node["class_type"] in nodes.CLASSES]
    assert len(ours) == (3 if way.ours else 0)
    for node in ours:
        kind: Any = nodes.CLASSES[node["class_type"]]
        asked = kind.INPUT_TYPES()
        every = {**asked["required"], **asked.get("optional", {})}
        assert set(asked["required"]) <= set(node["inputs"]) <= set(every)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_our_node_stands_before_or_after_the_features(row: Row) -> None:
    first, last = (workflow(row, way, "SD 1.5", 512, 4) for way in (FIRST, LAST))
    assert first["10"]["inputs"]["model"] == ["1", 0]
    assert last["3"]["inputs"]["model"] == ["10", 0]
    assert last["10"]["inputs"]["model"] == (["1", 0] if isinstance(row.model, Hole) else row.model)
    sampled = first["3"]["inputs"]["model"]
    assert sampled == (["10", 0] if isinstance(row.model, Hole) else row.model)


def test_names_tell_rows_apart() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("apart", "word"), [((8.0, 0.5), "right"), ((9.0, 0.5), "WRONG"), ((8.0, 0.7), "WRONG")]
)
def test_twice_the_yardstick_is_right(apart: tuple[float, float], word: str) -> None:
    verdict = matrix.Verdict("a row", "SD 1.5", own=(3.0, 0.2))
    verdict.judge(LAST, apart)
    assert verdict.word == word
    assert verdict.line().startswith(word)


def test_pictures_of_other_sizes_are_far_apart() -> None:
    one, other = np.zeros((1, 4, 4, 3)), np.ones((1, 4, 4, 3))
    assert matrix.differences(one, other) == (1.0, 1.0)
    assert matrix.differences(one, other[:, :2])[0] == float("inf")


def test_what_the_status_says_of_blocks_is_told() -> None:
    told = [
        "residual blocks: 8 of 8 are ours",
        "transformer blocks: 3 of 7 are ours",
        "4 x a patch",
    ]
    assert matrix.of_blocks(STATUS) == told
    counted = (
        "attention: 0 of 2 calls ours\n  ComfyUI's own, 2 calls: a mask\n"
        "Before it, since ComfyUI's start:\nVAE: 0 of 1 call ours\n  ComfyUI's own, 1 call: why"
    )
    assert matrix.told(counted) == ["attention: ComfyUI's own, 2 calls: a mask"]


def test_rows_whose_nodes_are_not_there_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "ComfyUI_IPAdapter_plus").mkdir()
    asked = argparse.Namespace(nodes=tmp_path, kind="SDXL", only=None)
    assert {row.needs for row in matrix._rows(asked)} == {"", "ComfyUI_IPAdapter_plus"}
    asked.only = ["FreeU"]
    assert [row.name for row in matrix._rows(asked)] == ["plain", "FreeU"]
