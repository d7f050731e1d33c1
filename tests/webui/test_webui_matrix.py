"""The matrix of pictures in a real WebUI: its judgement, its requests, and what it skips."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.webui.grey_webui import KNOWN, STATUS, Painter, png
from tools.webui_client import SCRIPT, Made
from tools.webui_matrix import bench, judge
from tools.webui_matrix.judge import FAR, Apart, Found, apart, tracebacks_of_ours, verdict
from tools.webui_matrix.scenarios import Scenario
from tools.webui_matrix.values import Model, World, labelled

NEAR, SOME = Apart(2, 0.05, False), Apart(20, 1.5, False)


def made(*values: int, side: int = 8, infotext: str = "") -> Made:
    return Made(tuple(png(value, side) for value in values), infotext, 0.1)


# --- how far apart


def test_pictures_are_as_far_apart_as_the_farthest_of_them() -> None:
    assert apart(made(3, 9), made(3, 9)) == Apart(0, 0.0, True)
    assert apart(made(3, 9), made(3, 5)) == Apart(4, 4.0, False)
    assert apart(made(3, 9), made(3, 5), first=True) == Apart(0, 0.0, False)


def test_another_number_or_size_is_as_far_as_can_be() -> None:
    assert apart(made(3, 9), made(3)) == FAR
    assert apart(made(3), made(3, side=16)) == FAR
    assert apart(made(3, 9), made(3), first=True).max == 0


def test_each_frame_of_a_film_counts() -> None:
    buffer = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), (value,) * 3) for value in (1, 7)]
    frames[0].save(buffer, "PNG", save_all=True, append_images=frames[1:])
    film = Made((buffer.getvalue(),), "", 0.0)
    assert [int(frame.max()) for frame in film.frames] == [1, 7]
    assert apart(film, made(1)) == FAR


# --- what it means


@pytest.mark.parametrize(
    ("changes", "word", "why"),
    [
        ({"on_off": NEAR}, judge.RIGHT, ""),
        ({"on_off": replace(NEAR, max=3)}, judge.WRONG, "more than 2/"),
        ({"on_off": replace(NEAR, mean=0.11)}, judge.WRONG, "/0.100"),
        ({"on_off": SOME, "yardstick": Apart(10, 0.75, False)}, judge.RIGHT, ""),
        ({"on_off": SOME, "yardstick": Apart(9, 0.75, False)}, judge.WRONG, "more than 18/"),
        ({"on_off": SOME, "yardstick": Apart(10, 0.7, False)}, judge.WRONG, "/1.400"),
        ({"effect": Apart(1, 0.019, False)}, judge.NO_EFFECT, "would not be seen"),
        (
            {"effect": Apart(9, 1.0, False), "yardstick": Apart(9, 0.5, False)},
            judge.NO_EFFECT,
            "would not be seen",
        ),
        ({"off_again": NEAR}, judge.WRONG, "off after on"),
        ({"off_again": NEAR, "repeats": False}, judge.UNSTEADY, "again"),
        ({"residue": {"off": Apart(), "on": NEAR}}, judge.WRONG, "ours on is another"),
        ({"residue": {"off": Apart(), "on": Apart()}}, judge.RIGHT, ""),
        ({"errors": {"off": ["x"], "on": ["y"]}}, judge.FAILED, "without ours: x"),
        ({"errors": {"off": [], "on": ["y"]}}, judge.WRONG, "with ours on: y"),
        ({"tracebacks": ["z"]}, judge.WRONG, "traceback of ours: z"),
        ({"ours": False}, judge.NOT_OURS, ""),
        ({"ours": False, "on_off": SOME}, judge.WRONG, "from off"),
    ],
)
def test_a_verdict_and_why(changes: dict[str, Any], word: str, why: str) -> None:
    found = verdict(Found(**changes))
    assert found[0] == word and why in " ".join(found[1]) and bool(found[1]) == bool(why)


@pytest.mark.parametrize("mean", [0.02, 0.1, 0.3, 5.0])
def test_a_lost_effect_is_wrong_however_weak_it_is(mean: float) -> None:
    effect = Apart(1, mean, False)
    assert verdict(Found(effect=effect))[0] == judge.RIGHT
    assert verdict(Found(effect=effect, on_off=effect))[0] == judge.WRONG


CONSOLE = """
Traceback (most recent call last):
  File "/extensions/other/scripts/theirs.py", line 3, in run
    fail()
ValueError: theirs
*** Error running process: /extensions/other/scripts/b.py
    Traceback (most recent call last):
      File "/webui/modules/scripts.py", line 3, in process
        go()
      File "/extensions/rocm-sd/lib_rocm_sd/hosts/x.py", line 9, in go
        return real()
    RuntimeError: ours
---
a line that names lib_rocm_sd
"""


def test_tracebacks_through_our_code_are_ours() -> None:
    assert tracebacks_of_ours(CONSOLE) == [
        'RuntimeError: ours <- File "/extensions/rocm-sd/lib_rocm_sd/hosts/x.py", line 9, in go'
    ]
    cut = CONSOLE[: CONSOLE.index("    RuntimeError: ours")].rstrip()
    assert len(tracebacks_of_ours(cut)) == 1


# --- requests


def test_arguments_are_the_defaults_changed_by_label_or_number() -> None:
    assert labelled(KNOWN, {}) == [False, 1, True]
    assert labelled(KNOWN, {"Active": 1, "Active#1": 2, 1: 3}) == [1, 3, 2]
    assert KNOWN[0]["value"] is False


@pytest.mark.parametrize("key", ["Activ", "Active#2", 3])
def test_an_argument_that_is_not_there_is_named_with_those_that_are(key: str | int) -> None:
    with pytest.raises(ValueError, match=rf"'{key}'.*Active.*Scale"):
        labelled(KNOWN, {key: 1})


SCRIPTED = Scenario("theirs", scripts={"theirs": {"Active": True}})


def acting(body: dict[str, Any]) -> bool:
    return body["alwayson_scripts"].get("theirs", {"args": [False]})["args"][0] is True


def measured(
    shade: Callable[[dict[str, Any], bool], int], out: Path, scenario: Scenario = SCRIPTED
) -> tuple[dict[str, Any], Painter]:
    painter = Painter(shade)
    made = bench.Bench(painter, World(painter, out))
    made.begin()
    painter.asked.clear()
    return made.measure(scenario, out), painter


def test_a_right_scenario_keeps_what_explains_it(tmp_path: Path) -> None:
    row, _ = measured(lambda body, on: 100 + 9 * acting(body), tmp_path)
    assert (row["verdict"], row["why"]) == (judge.RIGHT, [])
    assert row["effect"]["mean"] == 9 and row["infotext"] == "ROCm SD: attention"
    assert row["status"]["blocks"] == STATUS["unet"]["blocks"]
    assert row["status"]["events"] == ["b", "c", "d"]
    assert not list(tmp_path.glob("*.png"))


def test_off_and_on_come_in_turns_then_the_plain_ones_then_the_yardstick(tmp_path: Path) -> None:
    scenario = replace(SCRIPTED, order=("on", "off"), warm=True)
    _, painter = measured(lambda body, on: 100 + 9 * acting(body), tmp_path, scenario)
    turns = [(on, how) for _, on, how in painter.asked]
    auto = "Automatic"
    assert turns[:5] == [(False, auto), (True, auto), (False, auto), (False, auto), (True, auto)]
    assert turns[5:8] == [*((False, how) for how in bench.YARDSTICK), (True, auto)]
    assert painter.set[bench.OPTIMIZER] == auto


def test_more_pictures_are_an_effect_unless_a_script_adds_them(tmp_path: Path) -> None:
    more = Scenario("more", {"n_iter": 2})
    assert measured(lambda body, on: 100, tmp_path, more)[0]["verdict"] == judge.RIGHT
    added = replace(SCRIPTED, body={"n_iter": 2}, against={})
    assert measured(lambda body, on: 100, tmp_path, added)[0]["verdict"] == judge.NO_EFFECT


def test_an_effect_that_ours_loses_is_wrong_and_its_pictures_are_kept(tmp_path: Path) -> None:
    row, _ = measured(lambda body, on: 100 + 9 * (acting(body) and not on), tmp_path)
    assert row["verdict"] == judge.WRONG and "from off" in row["why"][0]
    assert [path.name for path in sorted(tmp_path.glob("*.png"))] == [
        "theirs-off.png",
        "theirs-on.png",
    ]


def test_what_stays_from_the_second_picture_on_is_wrong(tmp_path: Path) -> None:
    """A host that ours leaves another one after its first picture of the script."""
    seen: list[int] = []

    def shade(body: dict[str, Any], on: bool) -> int:
        left = bool(seen)
        if acting(body) and on:
            seen.append(1)
        return 100 + 9 * acting(body) + 20 * left

    row, _ = measured(shade, tmp_path)
    assert row["verdict"] == judge.WRONG
    assert [text.split(",")[0] for text in row["why"]] == [
        "off after on is another picture",
        "on is 20/20.000 from off",
        "the plain picture with ours off is another one afterwards",
        "the plain picture with ours on is another one afterwards",
    ]


def test_the_next_scenario_is_not_blamed(tmp_path: Path) -> None:
    left: list[int] = []

    def shade(body: dict[str, Any], on: bool) -> int:
        left.extend([20] if acting(body) and on and not left else [])
        return 100 + 9 * acting(body) + sum(left)

    painter = Painter(shade)
    made = bench.Bench(painter, World(painter, tmp_path))
    made.begin()
    found = [made.measure(SCRIPTED, tmp_path) for _ in range(2)]
    assert [row["verdict"] for row in found] == [judge.WRONG, judge.RIGHT]
    assert [row["effect"]["mean"] for row in found] == [9, 9], "against a new reference"


def test_a_plain_picture_that_fails_afterwards_is_whose_turn_it_was(tmp_path: Path) -> None:
    seen: list[int] = []

    def shade(body: dict[str, Any], on: bool) -> int:
        seen.extend([1] if acting(body) else [])
        return -1 if on and seen and not acting(body) else 100 + 9 * acting(body)

    row, _ = measured(shade, tmp_path)
    assert row["verdict"] == judge.WRONG and "ours on: out of memory" in row["why"][0]


def test_no_picture_takes_more_steps_than_asked_for(tmp_path: Path) -> None:
    painter = Painter(lambda body, on: body["steps"])
    made = bench.Bench(painter, World(painter, tmp_path, steps=3))
    found = [int(made.paint(body, {}, "off").frames[0].max()) for body in ({}, {"steps": 6})]
    assert found == [3, 3] and made.paint({"steps": 1}, {}, "off").frames[0].max() == 1


def test_a_picture_that_is_never_the_same_is_not_judged(tmp_path: Path) -> None:
    count = iter(range(100))
    row, _ = measured(lambda body, on: 100 + (next(count) if acting(body) else 0), tmp_path)
    assert row["verdict"] == judge.UNSTEADY and "without ours" in row["why"][0]


def test_a_failure_is_the_hosts_own_or_ours(tmp_path: Path) -> None:
    row, _ = measured(lambda body, on: -acting(body), tmp_path)
    assert row["verdict"] == judge.FAILED and "out of memory" in row["why"][0]
    row, _ = measured(lambda body, on: -1 if acting(body) and on else 9 * acting(body), tmp_path)
    assert row["verdict"] == judge.WRONG and "ours on: out of memory" in row["why"][0]


def test_a_script_that_did_not_load_is_a_failure(tmp_path: Path) -> None:
    absent = Scenario("x", scripts={"absent": {"Active": True}})
    row, _ = measured(lambda body, on: 100, tmp_path, absent)
    assert row["verdict"] == judge.FAILED and "no script 'absent'" in row["why"][0]


def test_an_argument_that_a_script_no_longer_has_is_a_failure(tmp_path: Path) -> None:
    renamed = Scenario("x", scripts={"theirs": {"Activated": True}})
    row, painter = measured(lambda body, on: 100, tmp_path, renamed)
    assert row["verdict"] == judge.FAILED and "'Activated', but" in row["why"][0]
    assert not painter.asked


def test_options_are_put_back_and_a_missing_model_is_a_reason(tmp_path: Path) -> None:
    scenario = Scenario("vae", options={"sd_vae": "other"})
    row, painter = measured(lambda body, on: 100, tmp_path, scenario)
    assert row["verdict"] == judge.NO_EFFECT and painter.set["sd_vae"] == "none"
    unlisted = replace(scenario, options={"hypertile_enable_unet": True})
    row, painter = measured(lambda body, on: 100, tmp_path, unlisted)
    assert row["verdict"] == judge.NO_EFFECT and painter.set["hypertile_enable_unet"] is False
    missing = replace(scenario, options={"sd_vae": Model("VAE", "b")})
    row, painter = measured(lambda body, on: 100, tmp_path, missing)
    assert row["verdict"] == judge.SKIPPED and row["why"] == ["no VAE with 'b' in its name"]
    assert painter.set["sd_vae"] == "none" and not painter.asked


def test_what_a_webui_has_no_setting_or_list_of_is_a_reason(tmp_path: Path) -> None:
    class Forge(Painter):
        def ask(self, route: str, body: Any = None) -> Any:
            if route == "sdapi/v1/sd-vae":
                raise RuntimeError(f'{route}: 404 {{"detail":"Not Found"}}')
            if route == "sdapi/v1/options" and "hypertile" in str(body):
                raise RuntimeError(f'{route}: 500 {{"error":"KeyError"}}')
            return super().ask(route, body)

    painter = Forge(lambda body, on: 100)
    made = bench.Bench(painter, World(painter, tmp_path))
    made.begin()
    for options, why in (
        ({"sd_vae": Model("VAE", "")}, "the WebUI does not list any VAE"),
        ({"hypertile_enable_unet": True}, "the WebUI has no setting of hypertile_enable_unet"),
    ):
        row = made.measure(Scenario("x", options=options), tmp_path)
        assert (row["verdict"], row["why"]) == (judge.SKIPPED, [why])


def test_the_yardstick_of_a_webui_with_one_attention_is_another_beside_it(tmp_path: Path) -> None:
    ours_off = {SCRIPT: {"args": [False]}}
    painter = Painter(lambda body, on: 100 + 40 * acting(body))
    asked: list[dict[str, Any]] = []

    class Beside(Painter):
        def ask(self, route: str, body: Any = None) -> Any:
            if not route.endswith("2img"):
                return super().ask(route, body)
            asked.append(body)
            return painter._painted(route, {**body, "alwayson_scripts": ours_off})

    beside = Beside(lambda body, on: 0)
    made = bench.Bench(painter, World(painter, tmp_path), beside)
    made.begin()
    painter.asked.clear()
    row = made.measure(replace(SCRIPTED, warm=True), tmp_path)
    assert row["yardstick"]["max"] == 40
    assert [set(body["alwayson_scripts"]) for body in asked] == [{"theirs"}] * 2
    assert {how for _, _, how in painter.asked} == {"Automatic"}


def test_another_that_fails_is_without_ours(tmp_path: Path) -> None:
    painter, beside = Painter(lambda body, on: 100 + 9 * acting(body)), Painter(lambda *_: 0)
    beside.ask = lambda *_: (_ for _ in ()).throw(OSError("refused"))  # type: ignore[method-assign]
    made = bench.Bench(painter, World(painter, tmp_path), beside)
    made.begin()
    row = made.measure(SCRIPTED, tmp_path)
    assert row["verdict"] == judge.FAILED and row["why"] == ["without ours: refused"]
