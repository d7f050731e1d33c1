"""The VAE's progress in the WebUI's bar, and its Interrupt button."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import FakeGpu, Start, WebUI
from vae_help import HALF, add_script, same, untouched


@pytest.fixture
def gpu() -> FakeGpu:
    made = FakeGpu()
    made.convs = True
    return made


class Clock:
    """Ten seconds pass between two looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 10.0
        return self.now


def interrupt_after(webui: WebUI, monkeypatch: Any, part: int, clock: Any) -> list[str | None]:
    """Interrupt during the first decode after `part` parts; gives what the progress bar showed."""
    coder = webui.library("hosts.webui.vae")
    shown: list[str | None] = []

    class Watch(coder.Watch):  # type: ignore[name-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, clock=clock, **kwargs)

        def progress(self, done: int, total: int) -> None:
            super().progress(done, total)
            shown.append(webui.shared.state.textinfo)
            if len(shown) == part:
                webui.shared.state.interrupt()

    monkeypatch.setattr(coder, "Watch", Watch)
    return shown


BIG = {"width": 128, "height": 512, "steps": 1}


def test_progress(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    webui.shared.state.textinfo = "Batch 1 of 1"
    shown = interrupt_after(webui, monkeypatch, 0, Clock())
    webui.txt2img(True, "Auto", "Always banded", **BIG)
    words = [str(text).split() for text in shown if text != "VAE: preparing."]
    done, total = [int(word[1]) for word in words], int(words[-1][3])
    assert done == sorted(done) and 3 < 0.8 * total < done[-1] <= total
    assert shown[-1] == f"VAE: {done[-1]} of {total} parts."
    assert webui.shared.state.textinfo == "Batch 1 of 1"


def test_interrupt_between_bands(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    monkeypatch.setattr(webui.library("hosts.webui.vae"), "ROUGH_PIXELS", 16)
    expected = webui.txt2img(True, "Auto", "Always banded", **BIG)
    shown = interrupt_after(webui, monkeypatch, 2, Clock())
    result = webui.txt2img(True, "Auto", "Always banded", batch_size=2, n_iter=2, **BIG)
    assert len(shown) == 2  # the second picture's decode is not begun, the second batch neither
    assert [image.size for image in result.images] == [(128, 512)] * 2
    assert "interrupted: a rough picture" in result.info
    rough, exact = result.decoded[0], expected.decoded[0]
    assert (rough.mean((0, 2, 3)) - exact.mean((0, 2, 3))).abs().max() < 0.1
    assert 0.02 < rough.std() < exact.std()
    assert untouched(webui) and not webui.errors_reported
    assert webui.shared.state.textinfo is None

    webui.shared.state.interrupted = False
    assert same(webui.txt2img(True, "Auto", "Always banded", **BIG), expected)


def test_an_interrupt_at_the_very_end_keeps_the_picture(
    start: Start, gpu: FakeGpu, monkeypatch: Any
) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    expected = webui.txt2img(True, "Auto", "Always banded", **BIG)
    interrupt_after(webui, monkeypatch, 2, lambda: 0.0)
    result = webui.txt2img(True, "Auto", "Always banded", **BIG)
    assert webui.shared.state.interrupted and same(result, expected)


def test_what_an_interrupted_sampler_has_is_decoded_in_full(
    start: Start, gpu: FakeGpu, monkeypatch: Any
) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    shown = interrupt_after(webui, monkeypatch, 0, Clock())

    def interrupt(self: Any, p: Any, *args: Any, **kwargs: Any) -> None:
        webui.shared.state.interrupt()

    add_script(webui, process_before_every_sampling=interrupt)
    result = webui.txt2img(True, "Auto", "Always banded", **BIG)
    assert len(shown) > 3 and "interrupted" not in result.info
