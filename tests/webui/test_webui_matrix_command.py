"""The matrix's scenarios, as requests, and its command."""

from __future__ import annotations

import argparse
import base64
import io
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.webui.grey_webui import KNOWN, Everything, Painter
from tools.webui_client import SCRIPT
from tools.webui_matrix import __main__ as matrix
from tools.webui_matrix import bench, judge
from tools.webui_matrix.scenarios import EXTENSIONS, FORGE, NATIVE, QUIET, Scenario
from tools.webui_matrix.values import Drawing, MissingError, Model, World, filled

ALL = (*EXTENSIONS, *FORGE, *NATIVE)


@pytest.mark.parametrize("scenario", ALL, ids=lambda scenario: scenario.name)
def test_each_scenario_is_a_request(scenario: Scenario, tmp_path: Path) -> None:
    folder = tmp_path / "sd-webui-animatediff/model"
    folder.mkdir(parents=True)
    for name in ("mm_sd_v15.safetensors", "mm_sd_v15_v2.safetensors"):
        (folder / name).write_text("")
    client = Everything(lambda body, on: 100)
    world = World(client, tmp_path, side=64)
    body, options = filled(scenario.body, world), filled(scenario.options, world)
    assert json.dumps([body, options, filled(scenario.scripts, world)])
    assert all(body.get(name, 64) % 8 == 0 for name in ("width", "height"))
    same = filled(scenario.reference, world) == body
    assert not same or options or scenario.scripts or scenario.needs, "nothing to see"
    assert {"off", "on"} == set(scenario.order)


def test_a_model_is_the_first_with_the_part_in_its_name(tmp_path: Path) -> None:
    world = World(Everything(lambda body, on: 100), tmp_path)
    assert filled([Model("LoRA", "loc"), Model("VAE", "-b")], world) == ["locon", "canny-b"]


def test_names_are_unique_and_chosen_by_pattern_or_kind() -> None:
    names = [scenario.name for scenario in ALL]
    assert len(set(names)) == len(names)
    assert matrix.chosen(ALL, "") == list(ALL)
    chosen = [scenario.name for scenario in matrix.chosen(EXTENSIONS, "ref,*controlnet")]
    assert chosen == [
        "ip: ip-adapter and controlnet",
        "ref: reference_only",
        "ref: reference_adain+attn",
        "ref: and controlnet",
        "cn: controlnet",
    ]


def test_pictures_have_the_side_that_is_asked_for(tmp_path: Path) -> None:
    world = World(Painter(lambda body, on: 100), tmp_path, side=48)
    for kind in ("circles", "noise", "mask"):
        file = base64.b64decode(filled(Drawing(kind), world))
        pixels = np.asarray(Image.open(io.BytesIO(file)))
        assert pixels.shape[:2] == (48, 48) and len(np.unique(pixels)) > 1


def test_a_missing_file_of_an_extension_is_a_reason(tmp_path: Path) -> None:
    (scenario,) = matrix.chosen(EXTENSIONS, "ad: animatediff v2*")
    with pytest.raises(MissingError, match=r"no file sd-webui-animatediff/model/\*v2\*"):
        filled(scenario.scripts, World(Painter(lambda body, on: 100), tmp_path))


def test_quiet_scripts_are_named_only_where_they_are(tmp_path: Path) -> None:
    painter = Painter(lambda body, on: 100 if set(body["alwayson_scripts"]) == {SCRIPT} else 0)
    made = bench.Bench(painter, World(painter, tmp_path))
    assert made.paint({}, {}, "off").frames[0].max() == 100
    made.known |= {(name, False): KNOWN for name in QUIET}
    with pytest.raises(ValueError, match="LoRA Block Weight"):
        made.paint({}, {}, "off")


# --- the command


def asked(**changes: Any) -> argparse.Namespace:
    absent = {"extensions": None, "only": "", "versions": None, "cache": None}
    others = {"side": 64, "steps": 2, "limit_s": 60.0, "launcher": "absent", "flags": []}
    others["several"] = False
    return argparse.Namespace(**{**absent, **others, **changes})


def test_an_extension_that_is_not_there_is_skipped_with_its_folder(tmp_path: Path) -> None:
    table = matrix.Table(tmp_path)
    assert not matrix.run(asked(only="ip,cn"), tmp_path, table)
    assert {row["verdict"] for row in table.rows} == {judge.SKIPPED}
    assert "sd-webui-controlnet" in table.rows[0]["why"][0]
    kept = json.loads((tmp_path / "webui-matrix.json").read_text(encoding="utf-8"))
    assert len(kept["rows"]) == len(matrix.chosen(EXTENSIONS, "ip,cn"))


class Serving:
    """In place of `serving`: WebUIs that paint, of which each ends after some scenarios."""

    def __init__(self, lives: list[int]) -> None:
        self.lives, self.started = lives, 0

    @contextmanager
    def bench(self, name: str) -> Iterator[Any]:
        self.started += 1
        left = self.lives.pop(0)
        if not left:
            raise RuntimeError("no module named torch")
        ended = iter([None] * (left - 1) + [1])
        running = SimpleNamespace(process=SimpleNamespace(poll=lambda: next(ended)))
        client = SimpleNamespace(running=running, since_start=lambda: 1.0, status=lambda: GREETING)
        yield SimpleNamespace(client=client, begin=dict, measure=self.measure)

    def measure(self, scenario: Scenario, out: Path) -> dict[str, Any]:
        return {"scenario": scenario.name, "verdict": judge.RIGHT, "why": []}


GREETING = {"device": {"name": "a card"}, "versions": {"torch": "2"}, "version": "1"}


def test_what_forge_has_built_in_comes_with_its_own_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "extensions-builtin/sd_forge_freeu").mkdir(parents=True)
    gone: list[tuple[str, list[str]]] = []

    def go(self: matrix.Matrix, name: str, scenarios: list[Scenario]) -> None:
        gone.append((name, [each.name for each in scenarios]))

    monkeypatch.setattr(matrix.Matrix, "go", go)
    table = matrix.Table(tmp_path)
    launcher = str(tmp_path / "launch.py")
    matrix.run(asked(only="ffu,fdt,plain", launcher=launcher), tmp_path, table)
    assert gone == [("extensions", []), ("none", ["ffu: freeu", "plain"])]
    (row,) = table.rows
    assert "no folder sd_forge_dynamic_thresholding among the WebUI's own" in row["why"][0]


@pytest.mark.parametrize("forge", [False, True])
def test_beside_forge_another_runs_without_ours(
    forge: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], set[str], Path]] = []

    @contextmanager
    def serving(
        launcher: str,
        flags: list[str],
        data: Path,
        extensions: Any,
        environment: Any,
        console: Path,
    ) -> Iterator[Any]:
        started.append((flags, set(extensions), data))
        yield Everything(lambda body, on: 100).running

    if forge:
        (tmp_path / "modules_forge").mkdir()
    (tmp_path / "ext/theirs").mkdir(parents=True)
    monkeypatch.setattr(matrix, "serving", serving)
    monkeypatch.setattr(matrix, "Bench", lambda client, world, other, several: other)
    command = matrix.Matrix(
        asked(
            launcher=str(tmp_path / "launch.py"), extensions=tmp_path / "ext", flags=["--ckpt", "x"]
        ),
        tmp_path,
        matrix.Table(tmp_path),
    )
    with command.bench("extensions") as other:
        pass
    assert started[0][:2] == (["--ckpt", "x"], {"theirs", "rocm-sd"})
    assert (other is not None) == forge and len(started) == 1 + forge
    if forge:
        flags, extensions, data = started[1]
        assert flags == ["--ckpt", "x", matrix.OTHER_ATTENTION] and extensions == {"theirs"}
        assert data != started[0][2]


@pytest.mark.parametrize(
    ("lives", "verdicts"),
    [
        ([4], ["right"] * 4),
        ([1, 3], ["right"] * 4),
        ([2, 0, 9], ["right", "right", judge.FAILED, "right"]),
        ([1, 1, 1], ["right", "right", "right", judge.SKIPPED]),
    ],
)
def test_a_webui_that_ends_is_started_again_for_the_rest(
    lives: list[int], verdicts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, host = matrix.Table(tmp_path), Serving(lives)
    command = matrix.Matrix(asked(), tmp_path, table)
    monkeypatch.setattr(command, "bench", host.bench)
    command.go("none", NATIVE[:4])
    assert [row["verdict"] for row in table.rows] == verdicts
    assert [row["scenario"] for row in table.rows] == [each.name for each in NATIVE[:4]]
    assert table.facts["device"] == "a card"


def test_what_no_time_is_left_for_is_skipped(tmp_path: Path) -> None:
    table = matrix.Table(tmp_path)
    assert not matrix.run(asked(only="plain,tiling", limit_s=-1.0), tmp_path, table)
    assert [row["verdict"] for row in table.rows] == [judge.SKIPPED] * 2
    assert "no time" in table.rows[0]["why"][0]


def committed(folder: Path) -> str:
    """A new repository with one commit, which is the answer."""
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    git = ["git", "-C", str(folder), *who]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", folder.name], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    return head.stdout.strip()


def test_versions_are_of_the_file_or_of_the_folders_own_git(tmp_path: Path) -> None:
    for name in ("listed", "cloned", "copied"):
        (tmp_path / name).mkdir()
    around, head = committed(tmp_path), committed(tmp_path / "cloned")
    file = tmp_path / "VERSIONS"
    file.write_text("listed abc\n\n", encoding="utf-8")
    found = matrix.versions(tmp_path, file)
    assert found == {"listed": "abc", "cloned": head, "copied": "not known"} and around != head
    assert matrix.versions(None, None) == {}
