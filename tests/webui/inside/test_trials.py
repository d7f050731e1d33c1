"""Kernels are tried in a process of their own: until then, and whatever comes of it, the WebUI's
own code makes the pictures; the accordion, the console and HTTP say why.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import unet_help
from accordion_help import by_id, events, refresh, script
from api_help import CHECK, STATUS, client_of
from conftest import FakeGpu, Start, WebUI
from test_first_launch import OURS, Builder, until
from trial_help import HALTS, OUTCOMES, SAID, Card, settled, trials, tried


@pytest.fixture
def card(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    """All starts of a test share their cache, as those of one WebUI do."""
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("ROCM_SD_CACHE_DIR", str(tmp_path / "shared"))
    gpu.convs = True
    made = tried(gpu)
    yield made
    made.end(until)


@pytest.fixture
def expected(start: Start) -> Any:
    """The WebUI's own picture."""
    return start(extension=False).txt2img().decoded[0]


def check(webui: WebUI) -> tuple[str, bool]:
    """What the button gives, pressed: the status, and whether the button is still there."""
    button = by_id(webui, "script_txt2img_rocm_sd_optimization_check")
    (function,) = events(webui, button["id"], "click")
    values = [control.value for control in script(webui).controls]
    _, _, status, after = function(*values)
    return status, bool(after["visible"])


def button(webui: WebUI) -> bool:
    found = by_id(webui, "script_txt2img_rocm_sd_optimization_refresh")
    (function,) = events(webui, found["id"], "click")
    return bool(function(*[control.value for control in script(webui).controls])[3]["visible"])


@pytest.mark.parametrize("trains", [False, True], ids=["pictures", "training"])
def test_gradients_are_tried_where_the_webui_trains_with_ours(
    start: Start, gpu: FakeGpu, card: Card, trains: bool
) -> None:
    """Behind all that pictures need. The four head_dims of Stable Diffusion are a class each,
    forward and backward.
    """

    def choose(webui: WebUI) -> None:
        webui.shared.opts.training_xattention_optimizations = trains

    webui = start(gpu=gpu, before=choose, ui=False)
    until(webui.is_ours)
    settled(webui, until)
    until(lambda: card.classes == 3 + 8 * trains)
    settled(webui, until)
    assert not trials(webui).state().refused and webui.is_ours()
    assert start(gpu=gpu, before=choose, ui=False).is_ours()
    assert card.classes == 3 + 8 * trains, "verdicts are kept"


def test_the_webuis_own_path_until_ours_was_tried(
    start: Start, gpu: FakeGpu, card: Card, expected: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    card.go.clear()
    webui = start(gpu=gpu)
    assert webui.applied == "ROCm SD"  # the setting and "Automatic" are as they will be
    until(lambda: trials(webui).state().total == 3)
    assert not webui.is_ours()
    assert "kernels are being tried (0 of 3)" in webui.status
    assert "0 of 3" in webui.library("hosts.webui.vae").refusals()[0]
    title, _, status = refresh(webui)
    assert title == "ROCm SD Optimization: Auto · trying kernels, 0 of 3"
    assert (
        "Trying kernels in a separate process: 0 of 3. Until they are ready, the WebUI's" in status
    )
    busy = webui.library("hosts.webui.speedtest").side.busy()
    assert busy == "Kernels are already being tried."
    answer = client_of(webui).get(STATUS).json()
    assert answer["trials"] | {"kernel": ""} == {
        **{"running": True, "done": 0, "total": 3, "kernel": "", "halted": "", "refused": []}
    }
    assert answer["attention"]["reasons"] == ["kernels are being tried (0 of 3)"]
    result = webui.txt2img()
    assert result.decoded[0].equal(expected)
    assert 'ROCm SD: "Auto, attention left to the WebUI, being tried"' in result.info
    assert not gpu.seen

    card.go.set()
    until(webui.is_ours)
    settled(webui, until)
    assert webui.library("hosts.webui.vae").refusals() == []
    webui.txt2img()  # what is in it was never seen before
    settled(webui, until)
    assert not webui.txt2img().decoded[0].equal(expected)
    assert gpu.seen
    assert card.children < card.classes
    out = capsys.readouterr().out
    assert "ROCm SD: trying new kernels in a process of their own, once" in out
    assert out.count("ROCm SD: attention runs on our kernel from now on") == 1
    assert not webui.errors_reported


def test_a_picture_and_the_status_say_that_the_unets_kernels_are_being_tested(
    start: Start, gpu: FakeGpu, card: Card
) -> None:
    card.with_unet = gpu.norms = True
    card.go.clear()
    webui = unet_help.begin(start, gpu)
    until(lambda: trials(webui).state().total == 4)
    info = webui.txt2img(*unet_help.AUTO).info
    assert 'ROCm SD UNet: "Auto, left to the WebUI, being tried"' in info
    options = webui.library("hosts.ui.options")
    shown = webui.library("hosts.webui.status").look(options.Options())
    (row,) = (row for row in shown.rows if row.operation == "UNet blocks")
    assert row.why == ("kernels are being tried (0 of 4)",)
    assert options.unet_from({options.UNET_KEY: "Auto, left to the WebUI, being tried"}) == "Auto"
    card.go.set()
    settled(webui, until)
    assert 'ROCm SD UNet: "Auto, 17 of 17 blocks, linear: ' in webui.txt2img(*unet_help.AUTO).info


def test_what_another_checkpoint_needs_is_tried_first(
    start: Start, gpu: FakeGpu, card: Card
) -> None:
    """The class in work is finished. A model that the WebUI has kept is seen by a generation."""
    card.with_unet = card.with_sdxl = gpu.norms = True
    card.go.clear()
    webui = start(gpu=gpu)
    ours, model = trials(webui), webui.shared.sd_model
    until(lambda: ours.state().total == 5 and card.asked and not ours._working)
    first_trials, arch = webui.library("first_trials"), webui.library("arch").by_gfx(card.gfx)

    def ranks(*parts: str) -> list[str]:
        until(lambda: not ours._working)
        classes = [each for part in parts for each in first_trials.classes(part, arch)]
        assert list(ours._gate._ranks) == [each.identity for each in classes]
        return list(map(str, classes))

    model.is_sdxl = True
    webui.script_callbacks.model_loaded_callback(model)
    ranks("attention", "unet SDXL", "vae", "unet SD1.5")
    model.is_sdxl = False
    webui.txt2img()
    ranks("attention", "unet SD1.5", "vae", "unet SDXL")
    model.is_sdxl = True
    webui.script_callbacks.model_loaded_callback(model)
    wanted = ranks("attention", "unet SDXL", "vae", "unet SD1.5")
    card.go.set()
    settled(webui, until)
    until(lambda: card.classes == 5)
    assert card.tried == wanted and not webui.errors_reported


def test_what_sd3_alone_needs_waits_for_such_a_checkpoint(
    start: Start, gpu: FakeGpu, card: Card
) -> None:
    """Also where all that a start tries was tried."""
    webui = start(gpu=gpu)
    ours, model = trials(webui), webui.shared.sd_model
    settled(webui, until)
    before = list(card.tried)
    assert "unet SD3" not in ours._expected and before
    model.is_sd3 = True
    webui.script_callbacks.model_loaded_callback(model)
    until(lambda: len(card.tried) > len(before))
    settled(webui, until)
    first_trials, arch = webui.library("first_trials"), webui.library("arch").by_gfx(card.gfx)
    (new,) = first_trials.classes("unet SD3", arch)
    assert card.tried == [*before, str(new)] and not webui.errors_reported


def test_a_picture_says_that_kernels_of_some_blocks_are_being_tested(
    start: Start, gpu: FakeGpu
) -> None:
    gpu.norms = True
    webui = unet_help.begin(start, gpu)
    script, takeover = webui.library("hosts.webui.script"), webui.library("unet.takeover")
    why = f"no convolution of ours: {webui.library('trials.gate').WAITS}"
    script.unet.rows = (takeover.KindReport("residual block", 5, 3, {why: 2}, {}),)
    assert script._blocks(3, 5).startswith("3 of 5 blocks, others being tried")
    assert script._blocks(0, 5) == "left to the WebUI, being tried"
    script.unet.rows = (takeover.KindReport("residual block", 5, 3, {"float32": 2}, {}),)
    assert "tried" not in script._blocks(3, 5) + script._blocks(0, 5)


def test_a_start_with_all_verdicts_asks_for_one_class_and_starts_nothing(
    start: Start, gpu: FakeGpu, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(gpu=gpu)
    until(first.is_ours)
    settled(first, until)
    children = card.children
    webui = start(gpu=gpu)
    assert webui.is_ours()  # at once
    assert card.children == children
    gate = trials(webui)._gate
    assert len(gate._known) == 1  # what is usable hangs on
    assert gate._thread is None
    assert not trials(webui)._working


def test_classes_are_tried_when_their_kernels_are_compiled(
    start: Start, gpu: FakeGpu, card: Card
) -> None:
    gpu.builder = builder = Builder()
    webui = start(gpu=gpu)
    assert (card.classes, trials(webui)._expected) == (0, {})
    builder.allow()
    until(webui.is_ours)
    settled(webui, until)
    assert card.classes == 3
    assert not webui.library("runtime.background").state().running


def test_answers_hold_from_the_next_picture_on(
    start: Start, gpu: FakeGpu, card: Card, expected: Any
) -> None:
    card.go.clear()
    card.of_attention = 1
    webui = start(gpu=gpu)
    until(lambda: trials(webui).state().total == 2 and card.asked)
    with webui.generating():
        card.go.set()
        until(lambda: trials(webui)._settling)
        assert not webui.is_ours()
        assert webui.txt2img().decoded[0].equal(expected)
        assert not gpu.seen
    until(webui.is_ours)


def test_plans_are_made_anew_when_a_part_is_through_not_for_each_of_its_classes(
    start: Start, gpu: FakeGpu, card: Card
) -> None:
    card.go.clear()
    webui = start(gpu=gpu)
    until(lambda: trials(webui).state().total == 3 and card.asked)
    until(lambda: not trials(webui)._settling)
    engine = webui.library("engine.engine").engine
    with webui.generating():
        before = engine.renewals
        trials(webui)._renew()  # as after the first of two classes
        assert not trials(webui)._settling
        card.go.set()
    until(webui.is_ours)
    settled(webui, until)
    until(lambda: not trials(webui)._settling)
    assert 1 <= engine.renewals - before <= 2


def test_nothing_is_tried_while_a_picture_is_made(start: Start, gpu: FakeGpu, card: Card) -> None:
    def held(webui: WebUI) -> None:
        webui.call_queue.queue_lock.acquire()

    webui = start(gpu=gpu, before=held)
    until(lambda: trials(webui).state().total == 3)
    assert card.classes == 0
    webui.call_queue.queue_lock.release()
    until(webui.is_ours)


@pytest.mark.parametrize("how", OUTCOMES)
def test_whatever_becomes_of_a_trial_the_webui_lives_and_says_it(
    start: Start,
    gpu: FakeGpu,
    card: Card,
    expected: Any,
    how: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    card.all(OUTCOMES[how])
    webui = start(gpu=gpu)
    until(lambda: webui.applied == "Doggettx")
    settled(webui, until)
    assert webui.txt2img().decoded[0].equal(expected)
    assert not gpu.seen
    assert card.classes == (1 if how in HALTS else 3)
    assert OURS not in [item.title() for item in webui.sd_hijack.optimizers]
    assert SAID[how] in webui.status
    assert SAID[how] in capsys.readouterr().out
    _, _, status = refresh(webui)
    assert SAID[how] in status
    assert "This may freeze the screen" in status
    assert button(webui)
    answer = client_of(webui).get(STATUS).json()
    assert SAID[how] in answer["attention"]["reasons"][0]
    assert any(SAID[how] in each["reason"] for each in answer["trials"]["refused"])
    halted = "we stopped testing kernels on this card"
    assert (halted in answer["trials"]["halted"]) == (how in HALTS)
    assert not webui.errors_reported


@pytest.mark.parametrize("how", ["abort", "wrong"])
def test_the_next_start_knows_and_who_asks_gets_ours_without_another(
    start: Start, gpu: FakeGpu, card: Card, expected: Any, how: str
) -> None:
    card.all(OUTCOMES[how])
    first = start(gpu=gpu)
    until(lambda: first.applied == "Doggettx")
    settled(first, until)
    tried_before = card.classes
    webui = start(gpu=gpu)
    assert webui.applied == "Doggettx"
    assert webui.txt2img().decoded[0].equal(expected)
    assert card.classes == tried_before
    assert button(webui)

    card.script.clear()
    card.go.clear()
    status, _ = check(webui)
    assert "3 kernels will be tested again, one by one." in status
    until(lambda: trials(webui).state().running)
    assert "Kernels are already being tried." in check(webui)[0]
    assert not button(webui)
    card.go.set()
    until(webui.is_ours)
    settled(webui, until)
    assert "None of our kernels is blocked on this card." in check(webui)[0]
    assert "This may freeze" not in refresh(webui)[2]


def test_only_the_second_class_dies(start: Start, gpu: FakeGpu, card: Card) -> None:
    card.script = {2: OUTCOMES["abort"]}
    webui = start(gpu=gpu)
    until(webui.is_ours)  # the class on which attention hangs has passed
    settled(webui, until)
    refused = dict(trials(webui).state().refused)
    assert len(refused) == 2
    assert sum("Memory access fault" in reason for reason in refused.values()) == 1
    assert sum(reason.startswith("a test faulted") for reason in refused.values()) == 1


def test_a_webui_that_died_in_its_own_first_launch_bars_the_class(
    start: Start, gpu: FakeGpu, card: Card, expected: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    first = start(gpu=gpu)
    until(first.is_ours)
    settled(first, until)
    every = trials(first)._gate._known.values()
    (known,) = [each for each in every if each.subject.first.head_dim == 40]
    folder = first.library("cache").directory() / "journal"
    folder.mkdir(exist_ok=True)
    line = '{"subject": "attention, the first", "device": "a card", "pid": 1}\n'
    (folder / f"{known.key}-99999999-abcd.trying").write_text(
        line + "Fatal Python error: Aborted\n"
    )
    children = card.children
    webui = start(gpu=gpu)
    said = "the program itself died in its first launch there: Fatal Python error: Aborted"
    assert f"ROCm SD: attention, the first: {said}" in capsys.readouterr().out
    assert webui.applied == "Doggettx"
    assert said in webui.status
    assert webui.txt2img().decoded[0].equal(expected)
    assert card.children == children
    later = start(gpu=gpu)
    assert said in later.status
    assert said not in capsys.readouterr().out.split("not used on this machine")[0]


def test_http_asks_only_with_the_api(start: Start, gpu: FakeGpu, card: Card) -> None:
    card.all(OUTCOMES["wrong"])
    webui = start(gpu=gpu, args="--api")
    until(lambda: webui.applied == "Doggettx")
    settled(webui, until)
    card.script.clear()
    assert client_of(webui).post(CHECK).status_code == 415  # as a foreign page would ask
    answer = client_of(webui).post(CHECK, json={})
    assert answer.status_code == 202
    assert answer.json()["said"] == "3 kernels will be tested again, one by one."
    until(webui.is_ours)
    webui.shared.cmd_opts.api = False
    refused = client_of(webui).post(CHECK, json={})
    assert refused.status_code == 403
    assert "--api" in refused.json()["detail"]
    assert client_of(webui).get(CHECK).status_code == 405


def test_compile_again_asks_for_every_verdict_anew(start: Start, gpu: FakeGpu, card: Card) -> None:
    webui = start(gpu=gpu)
    until(webui.is_ours)
    settled(webui, until)
    page = webui.library("hosts.webui.settings_page")
    page.cache.clear(("verdicts",))
    card.go.clear()
    page.compile_again()
    until(lambda: trials(webui).state().running)
    assert not webui.is_ours()
    assert page.clear() == page.compile_again() == page.TRYING
    card.go.set()
    until(webui.is_ours)


def test_what_the_self_test_found_holds_from_the_next_picture_on(
    start: Start, gpu: FakeGpu, card: Card
) -> None:
    """Its verdicts come from another process; nothing is tried again here."""
    card.all(OUTCOMES["wrong"])
    webui = start(gpu=gpu)
    until(lambda: webui.applied == "Doggettx")
    settled(webui, until)
    classes, verdicts = card.classes, webui.library("trials.verdicts")
    for key, verdict in list(verdicts.every()):
        verdicts.write(key, replace(verdict, outcome="passed", reason=""))
    refresh(webui)
    assert button(webui)
    trials(webui).look_again()
    until(webui.is_ours)
    assert "This may freeze" not in refresh(webui)[2]
    assert card.classes == classes
    assert not webui.errors_reported


class BesideZluda(Card):
    """The card's name is ZLUDA's, and the test beside it ends as `outcome` when `tested` is set."""

    def __init__(self, outcome: str) -> None:
        super().__init__()
        self.outcome, self.tested, self.tests = outcome, threading.Event(), 0

    def install(self) -> None:
        device: Any = importlib.import_module("lib_rocm_sd.device")
        engine: Any = importlib.import_module("lib_rocm_sd.engine.engine").engine
        judging: Any = importlib.import_module("lib_rocm_sd.trials.zluda")
        row = importlib.import_module("lib_rocm_sd.arch").by_gfx(self.gfx)
        info = device.DeviceInfo(0, "AMD Radeon RX 7900 XTX [ZLUDA]", "zluda", self.gfx, row)
        here = judging.Place(0, "hip", info.name, row, "", ("ZLUDA 3.9.5",))

        def identify(asked: Any) -> Any:
            return replace(info, reasons=judging.judge(info))

        def probe(place: Any, key: str) -> Any:
            self.tests += 1
            assert self.tested.wait(600)
            reason = "" if self.outcome == "passed" else "versions: its process crashed"
            made = judging.Verdict(judging.SUBJECT, self.outcome, reason)
            return judging.verdicts.write(key, made)

        device.identify = engine._planner.identify = identify
        judging.places.here = lambda info, index, arch: here
        judging.probe = probe
        super().install()


@pytest.mark.parametrize("outcome", ["passed", "faulted"])
def test_beside_zluda_ours_waits_for_a_test_which_decides(
    start: Start,
    gpu: FakeGpu,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: Any,
    outcome: str,
) -> None:
    monkeypatch.setenv("ROCM_SD_CACHE_DIR", str(tmp_path))
    gpu.card = card = BesideZluda(outcome)
    gpu.convs = True
    webui = start(gpu=gpu)
    assert webui.applied == "ROCm SD" and not webui.is_ours()
    assert "ZLUDA is tested in a process of its own first" in webui.status
    assert refresh(webui)[0] == "ROCm SD Optimization: not active, see below"
    assert webui.txt2img().decoded[0].equal(expected)
    card.tested.set()
    if outcome == "passed":
        until(webui.is_ours)
        settled(webui, until)
        assert not webui.txt2img().decoded[0].equal(expected)
    else:
        until(lambda: webui.applied != "ROCm SD")
        assert webui.txt2img().decoded[0].equal(expected)
        assert "faulted: versions: its process crashed" in webui.status
        assert "ROCM_SD_ALLOW_ZLUDA=1 overrules this" in webui.status
    again = start(gpu=gpu)
    assert (again.applied == "ROCm SD") == (outcome == "passed")
    assert card.tests == 1 and not webui.errors_reported
    assert button(again) == (outcome == "faulted")
    if outcome == "faulted":
        assert "ZLUDA did not pass its test" in refresh(again)[2]
        card.tested.clear()
        card.outcome = "passed"
        status, shown = check(again)
        assert "ZLUDA will be tested again in a separate process" in status and not shown
        card.tested.set()
        until(again.is_ours)
        settled(again, until)
        assert card.tests == 2 and not button(again) and not again.errors_reported
    card.end(until)
