"""The UNet's blocks are the WebUI's where these are faster, by played times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import FakeGpu, Start, WebUI
from unet_help import (
    AUTO,
    BLOCKS,
    WITHOUT,
    begin,
    blocks_shown,
    bytes_of,
    ours,
    session_of,
    unet_of,
    untouched,
)
from vae_help import same

STEPS = 14
"""Enough for two turns of both, of which one call is timed."""


@pytest.fixture
def gpu() -> FakeGpu:
    made = FakeGpu()
    made.norms = True
    return made


def start_timed(start: Start, gpu: FakeGpu, monkeypatch: Any, ours_ms: float) -> WebUI:
    """A WebUI whose UNet takes 5.5 ms by its own code, and `ours_ms` with blocks of ours."""
    monkeypatch.setenv("ROCM_SD_COMPARE_SPEED", "1")
    webui = begin(start, gpu)
    faster = webui.library("modules.faster")
    monkeypatch.setattr(faster, "is_card", lambda device: True)
    monkeypatch.setattr(faster, "SETTLING", {True: 1, False: 1})
    monkeypatch.setattr(faster, "TIMED", 1)

    def started(device: torch.device) -> Callable[[], Callable[[], float]]:
        ms = ours_ms if ours(webui) else 5.5
        return lambda: lambda: ms

    monkeypatch.setattr(faster, "begin", started)
    return webui


def hooks_of(webui: WebUI) -> int:
    unet = unet_of(webui)
    return len(unet._forward_hooks) + len(unet._forward_pre_hooks)


def test_the_slower_way_is_not_taken(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = start_timed(start, gpu, monkeypatch, 9.9)
    before = bytes_of(webui)
    plain = webui.txt2img(*WITHOUT)
    timed = webui.txt2img(*AUTO, steps=STEPS)
    decided = webui.txt2img(*AUTO)
    assert same(decided, plain)  # attention is ours in both
    assert untouched(webui) and bytes_of(webui) == before
    why = "the host's own is faster here, 5.5 ms for 9.9"
    assert session_of(webui).trouble == why
    assert why in timed.comments and "made some steps" in timed.comments
    assert not decided.comments and "a check differed" not in timed.info
    assert any(why in row.why for row in blocks_shown(webui))
    webui.txt2img(False)
    assert not hooks_of(webui) and not webui.errors_reported


def test_who_measures_ours_has_it(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    """As the speed test does; the next picture knows the verdict from its first step on."""
    webui = start_timed(start, gpu, monkeypatch, 9.9)
    plain = webui.txt2img(*WITHOUT)
    webui.txt2img(*AUTO, steps=STEPS)
    with webui.library("hosts.webui.speedtest").ours():
        assert ours(webui) == BLOCKS
    assert same(webui.txt2img(*AUTO), plain) and untouched(webui)


def test_another_size_is_another_question(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = start_timed(start, gpu, monkeypatch, 9.9)
    webui.txt2img(*AUTO, steps=STEPS)
    webui.txt2img(*AUTO)
    assert untouched(webui)
    monkeypatch.setattr(
        webui.library("modules.faster"), "begin", lambda device: lambda: lambda: 1.0
    )
    webui.txt2img(*AUTO, steps=STEPS, width=72, height=104)
    assert ours(webui) == BLOCKS
    webui.txt2img(*AUTO)
    assert untouched(webui)


def test_the_faster_way_stays_and_makes_the_same_picture_again(
    start: Start, gpu: FakeGpu, monkeypatch: Any
) -> None:
    webui = start_timed(start, gpu, monkeypatch, 1.0)
    webui.txt2img(*AUTO, steps=STEPS)
    assert ours(webui) == BLOCKS and not session_of(webui).trouble
    first = webui.txt2img(*AUTO)
    assert same(webui.txt2img(*AUTO), first) and f"{BLOCKS} of {BLOCKS} blocks" in first.info
    assert not webui.errors_reported


def test_off_amid_it_gives_everything_back(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = start_timed(start, gpu, monkeypatch, 9.9)
    expected, before = webui.txt2img(False), bytes_of(webui)
    for steps in range(2, 6):
        webui.txt2img(*AUTO, steps=steps)
        assert same(webui.txt2img(False), expected)
        assert untouched(webui) and bytes_of(webui) == before and not hooks_of(webui)


def test_a_forward_of_another_is_not_timed(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    """As sd-webui-controlnet's: what it does beside is not the UNet's time."""
    webui = start_timed(start, gpu, monkeypatch, 9.9)
    unet = unet_of(webui)
    unet.forward = unet.forward
    try:
        webui.txt2img(*AUTO, steps=STEPS)
        assert ours(webui) == BLOCKS
    finally:
        del unet.forward


def test_nothing_is_timed_where_that_is_switched_off(
    start: Start, gpu: FakeGpu, monkeypatch: Any
) -> None:
    webui = start_timed(start, gpu, monkeypatch, 9.9)
    monkeypatch.setenv("ROCM_SD_COMPARE_SPEED", "0")
    webui.txt2img(*AUTO, steps=STEPS)
    assert ours(webui) == BLOCKS and not hooks_of(webui)
