"""The Speed test tab and what the speed test does to the WebUI around it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from conftest import FakeGpu, Start, WebUI
from speed_help import WAIT_S, Test, method, reasons

TAB = "Speed test"


@pytest.fixture
def gpu() -> FakeGpu:
    made = FakeGpu()
    made.convs = True
    return made


@contextmanager
def generating(webui: WebUI) -> Iterator[None]:
    """A generation in another thread, as the WebUI's button makes it; it waits within."""
    begun, over = threading.Event(), threading.Event()

    def generate() -> None:
        with webui.call_queue.queue_lock:
            begun.set()
            over.wait(WAIT_S)

    thread = threading.Thread(target=generate)
    thread.start()
    begun.wait(WAIT_S)
    try:
        yield
    finally:
        over.set()
        thread.join()


def events(webui: WebUI, part: str = "rocm_sd_speed_") -> list[tuple[Any, list[Any]]]:
    """Events of a part of the tab: their function and outputs, in either gradio."""
    demo = webui.shared.demo
    blocks = demo.blocks
    found = []
    for place, entry in enumerate(demo.fns if isinstance(demo.fns, list) else demo.fns.values()):
        dependency = demo.dependencies[place] if isinstance(demo.fns, list) else None
        outputs = [blocks[i] for i in dependency["outputs"]] if dependency else entry.outputs
        named = [getattr(output, "elem_id", None) or "" for output in outputs]
        if any(name.startswith(part) for name in named):
            queued = dependency["queue"] if dependency else entry.queue
            api = dependency["api_name"] if dependency else entry.api_name
            assert queued is False
            assert api is False
            found.append((entry.fn, outputs))
    return found


def tabs(webui: WebUI) -> list[Any]:
    return [b for b in webui.shared.demo.blocks.values() if getattr(b, "label", None) == TAB]


# --- the page


def test_the_tab_is_there_once_after_each_reload(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    for _ in range(3):
        assert len(tabs(webui)) == 1
        assert len(webui.callbacks()["callbacks_ui_tabs"]) == 1
        webui.initialize.reload_ui()
    assert not webui.errors_reported


def test_every_event_answers_with_a_value_for_each_output(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    found = events(webui)
    assert len(found) == 5
    arguments: list[tuple[Any, ...]] = [("",), ([], "custom", "-8", ""), ("",)]
    for (function, outputs), given in zip(found, arguments, strict=False):
        assert len(function(*given)) == len(outputs)
    for function, (sizes,) in found[3:]:  # when the preset changes, and when the page is loaded
        assert sizes.elem_id == "rocm_sd_speed_sizes"
        assert not sizes.interactive
        given = [function(preset)["interactive"] for preset in ("quick", "standard", "custom")]
        assert given == [False, False, True]


def test_what_is_empty_is_not_shown(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    (poll, outputs), (run, more) = events(webui)[:2]
    empty = {"rocm_sd_speed_" + name for name in ("looks", "past", "facts", "export", "notice")}
    empty |= {"rocm_sd_speed_results", "rocm_sd_speed_bars"}
    assert {output.elem_id for output in more if not output.visible} == empty

    def seen(answers: list[Any], asked: list[Any]) -> set[str]:
        named = zip(asked, answers, strict=True)
        return {o.elem_id for o, a in named if isinstance(a, dict) and a.get("visible")}

    assert seen(poll(""), outputs) == set()
    assert seen(run([], "quick", "", ""), more) == {"rocm_sd_speed_notice"}
    Test(webui).run("attention")
    assert seen(poll(""), outputs) == empty - {"rocm_sd_speed_notice"}


def test_the_page_keeps_no_defaults_of_what_it_shows(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    blocks = {getattr(b, "elem_id", None): b for b in webui.shared.demo.blocks.values()}
    for name in ("poll", "token", "markdown"):
        assert blocks[f"rocm_sd_speed_{name}"].do_not_save_to_config
    for name in ("run", "cancel", "what", "preset", "sizes", "status"):
        assert f"rocm_sd_speed_{name}" in blocks


def test_a_card_can_be_checked(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    """What the check itself does is in tests/lab/test_card_check.py."""
    webui = start(gpu=gpu)
    (poll, page), (run, more), (stop, _) = events(webui, "rocm_sd_check")
    status, button, stops, _, result = poll("")
    assert "This card has not been checked yet." in status
    assert (button["interactive"], stops["interactive"], result) == (True, False, "")
    assert [len(page), len(more)] == [5, 6] == [len(poll("")), 1 + len(stop(""))]
    check, ran = webui.library("lab.card_check").check, []
    webui.shared.state.begin("task(1)")
    assert "Not started: the WebUI is busy: a generation is running" in run("")[0]["value"]
    webui.shared.state.end()
    with generating(webui):
        run("")
        assert check.wait(WAIT_S)
    assert "could not be run: the WebUI is busy: a generation is running" in poll("")[0]
    monkeypatch.setattr(type(check), "_followed", lambda self, side: ran.append(side) or Done())
    looked = webui.library("hosts.webui.speedtest").trials
    monkeypatch.setattr(looked, "_renew", lambda: ran.append("renewed"))
    assert run("")[0]["visible"] is False
    assert check.wait(WAIT_S)
    assert ran == [Test(webui).side, "renewed"]
    assert webui.shared.state.job == "" and webui.txt2img().images


class Done:
    """Progress of a check that is over."""

    state, text, done, total, path = "done", "", 0, 0, None


def test_without_a_card_the_check_says_why(start: Start) -> None:
    webui = start(cuda=False)
    (poll, _), *_ = events(webui, "rocm_sd_check")
    status, button, *_ = poll("")
    assert "This machine&#x27;s card cannot be checked: no GPU" in status
    assert button["interactive"] is False


# --- a test


def test_a_test_measures_ours_and_the_webuis_own(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    test = Test(webui)
    document = test.run("attention", "vae", "image")
    for name in ("rocm_sd", "WebUI's current (Doggettx)", "extension off", "extension on"):
        rows = method(document, name)
        assert rows, name
        assert not [row["reason"] for row in rows if row["reason"]]
    shown = test.view.state("")
    assert "WebUI&#x27;s current (Doggettx)" in shown.content.results
    assert shown.can_run
    (blocks,) = {row["reason"] for row in method(document, "extension on, UNet")}
    assert blocks == "the UNet's blocks are not ours: there is no layer norm"
    assert shown.content.pictures.count("data:image/png;base64,") == 5
    assert "Doggettx" in shown.content.markdown
    assert webui.is_ours()
    assert not webui.errors_reported


def test_the_pictures_are_those_of_a_generation(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    test = Test(webui)
    document = test.run("image")
    shot = test.session.shots(document["id"])[0]
    side = webui.library("lab.speed_job")
    steps = webui.library("lab.speed_job").CPU_EFFORTS["quick"].steps
    wanted = {
        "prompt": side.PROMPT, "seed": side.SEED, "steps": steps, "cfg_scale": 7.0,
        "width": 64, "height": 64,
    }  # fmt: skip
    for enabled, picture in ((False, shot.off), (True, shot.on)):
        expected = webui.txt2img(enabled, **wanted).images[0]
        assert np.array_equal(np.asarray(picture.image), np.asarray(expected))
        assert picture.seconds > 0
        assert picture.it_per_s > 0
    assert gpu.seen


def test_nothing_of_the_webuis_is_written(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    webui.shared.opts.set("samples_save", True)
    webui.txt2img(prompt="mine")
    params = webui.data / "params.txt"
    before, saved = params.read_text(), sorted((webui.data / "outputs").rglob("*.png"))
    assert "mine" in before
    assert len(saved) == 1
    test = Test(webui)
    test.run("image")
    assert params.read_text() == before
    assert not webui.shared.cmd_opts.no_prompt_history
    assert sorted((webui.data / "outputs" / "txt2img-images").iterdir()) == saved
    kinds = sorted(path.suffix for path in test.folder.iterdir())
    assert kinds == [".json", ".png", ".png", ".png"]


def test_a_page_opened_later_shows_the_same(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    test = Test(webui)
    test.run("image")
    first = test.view.state("")
    assert test.view.state(first.token).content is None
    again = webui.library("hosts.ui.speed_tab").View(
        webui.library("lab.speed_session").SpeedSession(), test.side
    )
    shown = again.state("")
    assert shown.content.results == first.content.results
    assert shown.content.pictures == first.content.pictures
    assert "The last result is shown" in shown.status


# --- one thing at a time


def test_no_test_starts_while_a_generation_runs(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    test = Test(webui)
    with generating(webui):
        assert "a generation is running" in test.start("attention")
    assert not test.session.running
    webui.shared.state.begin("task(1)")
    assert "a generation is running" in test.start("attention")
    webui.shared.state.end()
    test.run("attention")


def test_generations_wait_for_a_test(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = start(gpu=gpu)
    test = Test(webui)
    entered, go_on = threading.Event(), threading.Event()

    def vae() -> None:
        entered.set()
        go_on.wait(WAIT_S)

    monkeypatch.setattr(test.side, "vae", vae)
    lock = webui.call_queue.queue_lock
    assert test.start("vae") == ""
    assert entered.wait(WAIT_S)
    assert not lock.acquire(blocking=False)
    assert "a speed test is running" in test.start("vae")
    assert webui.shared.state.job
    shown = test.view.state("")
    assert not shown.can_run
    assert shown.can_cancel
    go_on.set()
    assert test.session.wait(WAIT_S)
    assert lock.acquire(blocking=False)
    lock.release()
    assert webui.shared.state.job == ""
    assert webui.txt2img().images


def test_cancel_ends_a_picture_between_two_steps(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    test = Test(webui)
    unet = webui.shared.sd_model.model.diffusion_model
    reached, calls = threading.Event(), []

    def wait(*_: Any) -> None:
        calls.append(1)
        reached.set()
        for _ in range(1000):
            if test.session._cancel.wait(0.01):
                return

    hook = unet.register_forward_pre_hook(wait)
    assert test.start("image") == ""
    assert reached.wait(WAIT_S)
    test.view.cancel()
    assert test.session.wait(WAIT_S)
    hook.remove()
    assert test.session.progress().state == "cancelled"
    assert len(calls) == 1
    assert webui.is_ours()
    assert not unet._forward_pre_hooks
    assert webui.txt2img().images
    assert "ancelled" in test.view.state("").status


# --- where it cannot be


def fails(webui: WebUI, monkeypatch: Any, error: BaseException) -> None:
    def sample(*_: Any, **__: Any) -> None:
        raise error

    kind = webui.processing.StableDiffusionProcessingTxt2Img
    monkeypatch.setattr(kind, "sample", sample)


def test_failures_of_the_webui_are_reasons(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = start(gpu=gpu)
    test = Test(webui)
    error: Callable[[str], BaseException]
    for error, said in (
        (webui.devices.NansException, "NansException: <b>NaN</b>"),
        (torch.cuda.OutOfMemoryError, "out of memory at 64x64"),
    ):
        fails(webui, monkeypatch, error("<b>NaN</b>"))
        assert reasons(test.run("image"))[:2] == [said, said]
        assert "<b>NaN" not in test.view.state("").content.results
        assert webui.is_ours()


def test_an_interrupted_picture_is_not_measured(
    start: Start, gpu: FakeGpu, monkeypatch: Any
) -> None:
    webui = start(gpu=gpu)
    stop = webui.processing.store_latent

    def store(latent: Any) -> None:
        webui.shared.state.interrupt()
        stop(latent)

    monkeypatch.setattr(webui.processing, "store_latent", store)
    found = reasons(Test(webui).run("image"))
    assert found[:2] == ["interrupted in the WebUI"] * 2


def test_without_a_checkpoint(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu, args="--skip-load-model-at-start")
    assert webui.sd_models.model_data.sd_model is None
    found = reasons(Test(webui).run("vae", "step", "image"))
    assert set(found) == {"no checkpoint is loaded"}
    assert webui.sd_models.model_data.sd_model is None


def test_a_checkpoint_without_a_vae(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    del webui.shared.sd_model.first_stage_model.decoder
    assert reasons(Test(webui).run("vae")) == ["there is no VAE to run"]


def test_where_the_extension_does_nothing(start: Start) -> None:
    webui = start(cuda=False)
    document = Test(webui).run("attention", "image")
    assert "not in use" in method(document, "extension on")[0]["reason"]
    assert not method(document, "extension off")[0]["reason"]
    assert method(document, "WebUI's current (InvokeAI)")
    assert all(row["reason"] for row in method(document, "rocm_sd"))


def test_a_vae_elsewhere_is_moved_and_moved_back(
    start: Start, gpu: FakeGpu, monkeypatch: Any
) -> None:
    webui = start(gpu=gpu)
    side = Test(webui).side
    moves: list[Any] = []
    decoder = webui.shared.sd_model.first_stage_model.decoder
    decoder.to = lambda device: moves.append(torch.device(device).type)
    monkeypatch.setattr(type(side), "device", torch.device("meta"))
    with side.queue():
        assert side.vae() is decoder
        assert moves == ["meta"]
    assert moves == ["meta", "cpu"]


# --- the WebUI's attention alone


@pytest.mark.parametrize("family", ["ldm", "sgm"])
@pytest.mark.parametrize(
    "setting", ["Automatic", "sdp - scaled dot product", "V1 - original v1", "InvokeAI", "None"]
)
def test_the_webuis_attention_is_right(
    start: Start, gpu: FakeGpu, setting: str, family: str
) -> None:
    webui = start(gpu=gpu, family=family)
    webui.shared.opts.set("cross_attention_optimization", setting)
    calls = len(gpu.seen)
    (name, attend), *others = Test(webui).side.attention_methods().items()
    assert not others
    assert name == {"Automatic": "Doggettx", "None": "none"}.get(setting, setting.split()[0])
    generator = torch.Generator().manual_seed(0)
    for heads, queries, keys, head_dim in ((8, 36, 36, 8), (2, 36, 7, 16), (1, 36, 36, 32)):
        q, k, v = (
            torch.randn((2, length, 3, heads, head_dim), generator=generator)[:, :, 1]
            for length in (queries, keys, keys)
        )
        scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * head_dim**-0.5
        exact = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.double()).flatten(2)
        out = attend(q, k, v)
        assert out.shape == exact.shape
        assert (out - exact).abs().max() < 1e-5
    assert len(gpu.seen) == calls
    assert webui.is_ours() == (setting == "Automatic")
