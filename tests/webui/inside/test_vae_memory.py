"""What is packed of the VAE's weights, and when its memory is given back."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from conftest import FakeGpu, Start, WebUI
from vae_help import HALF, add_script, coders, same


@pytest.fixture
def gpu() -> FakeGpu:
    made = FakeGpu()
    made.convs = True
    return made


def programs(webui: WebUI) -> list[Any]:
    """The decoder's and the encoder's, of the present model."""
    session = webui.library("hosts.webui.vae").session
    return [item._program for item in session._coders[webui.shared.sd_model.first_stage_model]]


def leave_the_gpu(webui: WebUI) -> None:
    """What the WebUI does to a checkpoint that it keeps in main memory."""
    for parameter in webui.shared.sd_model.first_stage_model.parameters():
        parameter.data = parameter.data.clone()


def test_it_is_kept_while_the_vae_stays(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    webui.txt2img()
    program = programs(webui)[0]
    packed = program._ready
    webui.txt2img()
    assert packed and program._ready is packed


def test_another_checkpoint_is_loaded(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    webui.txt2img()
    old, program = webui.shared.sd_model, programs(webui)[0]
    leave_the_gpu(webui)
    assert program._ready
    webui.sd_models.load_model("model-3")
    assert not program._ready and webui.shared.sd_model is not old


def test_a_checkpoint_from_main_memory_is_used_again(start: Start, gpu: FakeGpu) -> None:
    """Of that no callback tells."""
    webui = start(gpu=gpu, dtype=HALF)
    expected = webui.txt2img()
    old, first = webui.shared.sd_model, programs(webui)[0]
    other = webui.sd_models.load_model("model-3")
    webui.txt2img(override_settings={"sd_model_checkpoint": "model-3"})
    second = programs(webui)[0]
    assert first._ready and second._ready  # both models are on the GPU
    leave_the_gpu(webui)
    webui.shared.sd_model = webui.sd_models.model_data.sd_model = old
    webui.sd_models.loaded["name"] = "model-0"
    webui.shared.opts.sd_model_checkpoint = "model-0"
    assert same(webui.txt2img(False), webui.txt2img(False))
    assert first._ready and not second._ready
    assert other is not old and same(webui.txt2img(), expected)


def test_the_model_leaves_at_the_end_of_a_generation(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    add_script(webui, postprocess_batch=lambda self, p, *args, **kwargs: leave_the_gpu(webui))
    result = webui.txt2img()
    assert "whole frame" in result.info and not programs(webui)[0]._ready
    assert same(webui.txt2img(), result)


def test_a_preview_that_still_runs_keeps_its_weights(
    start: Start, gpu: FakeGpu, monkeypatch: Any
) -> None:
    """Level Memory gives back at the end; a preview may be at work in a thread of its own."""
    webui = start(gpu=gpu, dtype=HALF)
    webui.txt2img()
    program, decoder = programs(webui)[0], coders(webui)[0]
    session = webui.library("hosts.webui.vae").session
    options = webui.library("hosts.ui.options")
    run = type(program)._run
    made: list[torch.Tensor] = []

    def ending(self: Any, *args: Any) -> Any:
        end = threading.Thread(target=session.end)
        end.start()
        end.join()
        assert self._ready
        return run(self, *args)

    def preview() -> None:
        with torch.no_grad():
            made.append(decoder(image))

    image = torch.zeros(1, 4, 8, 8, dtype=HALF)
    session.begin()
    session.establish(options.parse(True, "Memory")[0])
    with torch.no_grad():
        expected = decoder(image)
    monkeypatch.setattr(type(program), "_run", ending)
    thread = threading.Thread(target=preview)
    thread.start()
    thread.join()
    assert len(made) == 1 and torch.equal(made[0], expected)
    assert not program._ready
