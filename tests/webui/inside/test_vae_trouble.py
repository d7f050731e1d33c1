"""The VAE where something is in the way: others, float32, failures, Interrupt, NaN."""

from __future__ import annotations

import copy
import io
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import FakeGpu, Start, WebUI
from vae_help import (
    HALF,
    add_script,
    break_program,
    coders,
    runs,
    same,
    untouched,
)


@pytest.fixture
def gpu() -> FakeGpu:
    made = FakeGpu()
    made.convs = True
    return made


class TiledVae:
    """What multidiffusion-upscaler's Tiled VAE does to the coders; its hook calls the whole one."""

    class VAEHook:
        def __init__(self, net: Any) -> None:
            self.net = net
            self.calls = 0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.net.original_forward(x)

    def __init__(self, webui: WebUI) -> None:
        self.webui = webui

    def process(self, *args: Any) -> None:
        for coder in coders(self.webui):
            if not hasattr(coder, "original_forward"):
                coder.original_forward = coder.forward
            coder.forward = self.VAEHook(coder)

    def postprocess(self, *args: Any) -> None:
        for coder in coders(self.webui):
            if isinstance(coder.forward, self.VAEHook):
                coder.forward = coder.original_forward


@pytest.mark.parametrize("first", [True, False])
def test_tiled_vae_is_left_alone(start: Start, gpu: FakeGpu, monkeypatch: Any, first: bool) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    expected = webui.txt2img(True, "Auto", "Off")
    ours = webui.txt2img()
    seen = runs(webui, monkeypatch)
    tiled = TiledVae(webui)
    if first:  # it was there before us, or is left over from a crash
        tiled.process()
    else:
        add_script(
            webui,
            process=lambda self, p, *args: tiled.process(),
            postprocess=lambda self, p, processed, *args: tiled.postprocess(),
        )
    result = webui.txt2img()
    assert not seen and same(result, expected)
    assert "left to the WebUI" in result.info
    assert "VAEHook of test_vae" in result.comments
    assert "VAEHook of test_vae" in webui.status
    if first:
        assert isinstance(coders(webui)[0].forward, tiled.VAEHook)
        assert coders(webui)[0].forward.calls == 1
        tiled.postprocess()
    else:
        webui.scripts.scripts_txt2img.alwayson_scripts.pop()

    assert same(webui.txt2img(False), webui.txt2img(False))
    assert not seen
    again = webui.txt2img()
    assert len(seen) == 1 and same(again, ours)
    assert not webui.errors_reported


def test_what_others_kept_of_us_is_the_webuis(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    """An extension that copies the model, or keeps the forward, amid a generation."""
    webui = start(gpu=gpu, dtype=HALF)
    kept: list[Any] = []

    def keep(self: Any, p: Any, *args: Any) -> None:
        decoder = coders(webui)[0]
        kept.extend([decoder.forward, copy.deepcopy(decoder)])

    add_script(webui, process=keep)
    webui.txt2img()
    seen = runs(webui, monkeypatch)
    forward, decoder = kept
    latent = torch.randn(1, 4, 8, 8).to(HALF)
    with torch.no_grad():
        own = coders(webui)[0](latent)
        assert torch.equal(forward(latent), own)
        assert torch.equal(decoder(latent), own)
    assert not seen


@pytest.mark.parametrize(
    ("args", "named"), [("--no-half-vae", "--no-half-vae"), ("--no-half", "--no-half"), ("", "")]
)
def test_float32_is_honoured(
    start: Start, gpu: FakeGpu, monkeypatch: Any, args: str, named: str
) -> None:
    expected = start(gpu=gpu).txt2img(True, "Auto", "Off")
    webui = start(gpu=gpu, args=args)
    assert named in webui.status and "its weights are float32" in webui.status
    assert not args or "costs speed and is not needed" in webui.status
    seen = runs(webui, monkeypatch)
    result = webui.txt2img()
    assert not seen and same(result, expected)
    assert 'ROCm SD VAE: "Auto, left to the WebUI"' in result.info


def test_tiling_is_the_webuis(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    """For "Tiling" the WebUI sets padding_mode of all convolutions, those of the VAE too."""

    def circular(webui: WebUI, mode: str = "circular") -> None:
        for module in webui.shared.sd_model.modules():
            if isinstance(module, torch.nn.Conv2d):
                module.padding_mode = mode
                padding = [side for size in reversed(module.padding) for side in (size, size)]
                module._reversed_padding_repeated_twice = padding

    webui = start(gpu=gpu, dtype=HALF)
    ours = webui.txt2img()
    circular(webui)
    result, expected = webui.txt2img(), webui.txt2img(True, "Auto", "Off")
    assert same(result, expected) and not same(result, ours)
    assert "circular" in result.comments
    circular(webui, "zeros")
    assert same(webui.txt2img(), ours)


def test_failure_of_ours(
    start: Start, gpu: FakeGpu, monkeypatch: Any, capsys: Any, caplog: Any
) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    expected = webui.txt2img(True, "Auto", "Off", n_iter=2)
    with monkeypatch.context() as patch:
        calls = break_program(webui, patch, RuntimeError("a planted failure"))
        result = webui.txt2img(n_iter=2)
        assert not webui.txt2img().comments
    assert same(result, expected)
    assert len(calls) == 2  # once a generation: the second picture does not pay for it again
    assert "left to the WebUI" in result.info
    assert result.comments.count("a planted failure") == 1
    assert capsys.readouterr().out.count("a planted failure") == 1
    assert caplog.text.count("Traceback") == 1
    assert "a planted failure" in webui.status
    assert "whole frame" in webui.txt2img().info
    assert "planted" not in webui.status


def test_a_console_that_lacks_a_letter_costs_no_picture(
    start: Start, gpu: FakeGpu, monkeypatch: Any
) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    expected = webui.txt2img(True, "Auto", "Off")
    console = io.TextIOWrapper(io.BytesIO(), encoding="cp1252", write_through=True)
    with monkeypatch.context() as patch:
        break_program(webui, patch, RuntimeError("planted in /\u6269\u5c55"))
        patch.setattr(sys, "stdout", console)
        result = webui.txt2img()
    assert same(result, expected)
    assert "planted in /\u6269\u5c55" in result.comments
    assert b"left to the WebUI: " in console.buffer.getvalue()
    assert b"planted in /\\u6269\\u5c55" in console.buffer.getvalue()


def test_a_mistake_of_ours_when_asked_for_the_kernels_is_in_the_log_once(
    start: Start, gpu: FakeGpu, monkeypatch: Any, caplog: Any
) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    vae = webui.library("hosts.webui.vae")

    def mistaken(*args: Any) -> Any:
        raise AttributeError("planted")

    monkeypatch.setattr(vae.engine, "usable", mistaken)
    assert vae.refusals() == vae.refusals() == ["AttributeError: planted"]
    assert caplog.text.count("Traceback") == 1 and "in mistaken" in caplog.text


@pytest.mark.parametrize("kind", ["OutOfMemoryError", "MemoryError"])
def test_out_of_memory_is_passed_on(
    start: Start, gpu: FakeGpu, monkeypatch: Any, kind: str
) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    error = getattr(torch.cuda, kind, MemoryError)
    with monkeypatch.context() as patch:
        break_program(webui, patch, error("out of memory"))
        with pytest.raises(error):
            webui.txt2img()
    assert "whole frame" in webui.txt2img().info
    assert untouched(webui)


def preview_only(whole: Any, instead: Any) -> Any:
    """`whole` in the generation's thread, `instead` in those of live previews."""
    own = threading.get_ident()

    def call(self: Any, image: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = (whole if threading.get_ident() == own else instead)(
            self, image, **kwargs
        )
        return made

    return call


def test_a_failing_preview_is_no_matter_of_the_picture(
    start: Start, gpu: FakeGpu, monkeypatch: Any, capsys: Any
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a planted failure")

    webui = start(gpu=gpu, dtype=HALF)
    expected = webui.txt2img()
    webui.shared.opts.show_progress_every_n_steps = 1
    webui.shared.opts.show_progress_type = "Full"
    program = webui.library("vae.program").Program
    monkeypatch.setattr(program, "__call__", preview_only(program.__call__, fail))
    result = webui.txt2img(steps=4)
    assert 'ROCm SD VAE: "Auto, whole frame, conv: torch"' in result.info
    assert not result.comments and "planted" not in webui.status
    assert webui.shared.state.current_image is not None and not webui.errors.recorded
    assert capsys.readouterr().out.count("a live preview was left to the WebUI: ours failed") == 1
    webui.shared.opts.live_previews_enable = False
    assert same(webui.txt2img(), expected)


def test_a_previews_budget_is_not_told(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    """Only the picture's own is; here the plan of the picture says that it kept to its budget."""
    webui = start(gpu=gpu, dtype=HALF)
    webui.shared.opts.show_progress_every_n_steps = 1
    webui.shared.opts.show_progress_type = "Full"
    program = webui.library("vae.program").Program
    whole = program.__call__

    def plenty(self: Any, image: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = whole(self, image, **kwargs)
        self.last_plan = replace(self.last_plan, peak_bytes=1)
        return made

    monkeypatch.setattr(program, "__call__", preview_only(plenty, whole))
    result = webui.txt2img(True, "Auto", "Auto", 1, width=256, height=320, steps=1)
    assert not result.comments


def test_a_previews_convolutions_are_not_the_pictures(
    start: Start, gpu: FakeGpu, monkeypatch: Any
) -> None:
    """Here previews alone run our program: the picture's infotext names no convolution."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a planted failure")

    webui = start(gpu=gpu, dtype=HALF)
    webui.shared.opts.show_progress_every_n_steps = 1
    webui.shared.opts.show_progress_type = "Full"
    program = webui.library("vae.program").Program
    monkeypatch.setattr(program, "__call__", preview_only(fail, program.__call__))
    result = webui.txt2img(steps=4)
    assert 'ROCm SD VAE: "Auto, left to the WebUI"' in result.info
    rows = webui.library("report").snapshot()["rows"]
    assert {row["part"] for row in rows if row["family"] == "conv"} == {"Live preview"}


def test_nans_reach_the_webuis_check(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = start(gpu=gpu, dtype=HALF, args="--disable-nan-check")
    model = webui.shared.sd_model

    def nans(x: torch.Tensor, t: Any, cond: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full_like(x, float("nan"))

    model.apply_model = nans
    assert webui.txt2img().decoded[0].isnan().all()
    webui.shared.cmd_opts.disable_nan_check = False
    with pytest.raises(webui.devices.NansException, match="unet"):
        webui.txt2img()


def test_a_vae_that_gives_nans_is_retried_by_the_webui(start: Start, gpu: FakeGpu) -> None:
    """Weights beyond rescue: the WebUI turns the VAE to float32, which is then its own."""
    webui = start(gpu=gpu, dtype=HALF)
    decoder = coders(webui)[0]
    with torch.no_grad():
        decoder.conv_out.bias.fill_(float("nan"))
    whole = decoder.conv_out.to

    def mend(*args: Any) -> Any:
        with torch.no_grad():
            decoder.conv_out.bias.fill_(0.0)
        return whole(*args)

    webui.shared.sd_model.first_stage_model.to = lambda *args: (
        mend()
        and type(webui.shared.sd_model.first_stage_model).to(
            webui.shared.sd_model.first_stage_model, *args
        )
    )
    result = webui.txt2img()
    assert not result.decoded[0].isnan().any()
    assert next(decoder.parameters()).dtype == torch.float32
    assert "left to the WebUI" in result.info


def test_gradients_are_the_webuis(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    seen = runs(webui, monkeypatch)
    session = webui.library("hosts.webui.vae").session
    session.establish(webui.library("hosts.ui.options").DEFAULTS)
    latent = torch.randn(1, 4, 8, 8).to(HALF).requires_grad_()
    coders(webui)[0](latent).float().sum().backward()
    session.end()
    assert latent.grad is not None and not seen


def test_crash_in_the_middle(start: Start, gpu: FakeGpu) -> None:
    expected = start(extension=False, dtype=HALF).txt2img()
    webui = start(gpu=gpu, dtype=HALF)
    ours = webui.txt2img()
    model = webui.shared.sd_model
    whole = model.apply_model
    model.apply_model = None
    with pytest.raises(TypeError):
        webui.txt2img()
    model.apply_model = whole
    assert same(webui.txt2img(False), expected) and untouched(webui)
    assert same(webui.txt2img(), ours) and untouched(webui)


def test_reload_amid_a_generation_leaves_nothing(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    session = webui.library("hosts.webui.vae").session
    session.establish(webui.library("hosts.ui.options").DEFAULTS)
    assert not untouched(webui)
    webui.initialize.reload_ui()
    assert untouched(webui)


def test_no_convolutions(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    gpu.convs = False
    webui = start(gpu=gpu, dtype=HALF)
    seen = runs(webui, monkeypatch)
    result = webui.txt2img()
    assert not seen and "ROCm SD VAE" not in result.info
    assert "The WebUI's own code runs the VAE: there is no conv 3x3." in webui.status


def test_weights_written_through_data_are_seen_and_said(
    start: Start, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A corner of the second picture is compared with what the WebUI makes of it."""
    monkeypatch.delenv("ROCM_SD_SPOT_CHECK", raising=False)
    webui = start(gpu=gpu, dtype=HALF)
    assert not webui.txt2img().comments
    for parameter in coders(webui)[0].parameters():
        parameter.data.mul_(0.8)
    told = webui.txt2img()
    assert "a corner of the image differed by" in told.comments
    again = webui.txt2img()
    assert not again.comments and "whole frame" in again.info
