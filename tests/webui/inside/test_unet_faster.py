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

PICTURES = 4
"""Two of both sides, of which one call each is timed."""
WHY = "the WebUI's own code is faster here, 5.5 ms for 9.9"
TIMED = "the WebUI's own code is being timed, once"


@pytest.fixture
def gpu() -> FakeGpu:
    made = FakeGpu()
    made.norms = True
    return made


def start_timed(start: Start, gpu: FakeGpu, monkeypatch: Any, ours_ms: float) -> WebUI:
    """A WebUI whose UNet takes 5.5 ms by its own code, and `ours_ms` with blocks of ours."""
    monkeypatch.delenv("ROCM_SD_COMPARE_SPEED")
    webui = begin(start, gpu)
    faster = webui.library("modules.faster")
    monkeypatch.setattr(faster, "is_compared_on", lambda device: True)
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
    first, theirs, again, more = (webui.txt2img(*AUTO) for _ in range(PICTURES))
    assert same(theirs, plain) and same(more, plain)  # attention is ours in both
    assert same(again, first) and not same(first, plain)
    assert TIMED in theirs.comments and TIMED in more.comments and TIMED not in first.comments
    decided = webui.txt2img(*AUTO)
    assert same(decided, plain) and untouched(webui) and bytes_of(webui) == before
    assert session_of(webui).trouble == WHY and WHY in decided.comments
    assert not webui.txt2img(*AUTO).comments
    assert any(WHY in row.why for row in blocks_shown(webui))
    webui.txt2img(False)
    assert not hooks_of(webui) and not webui.errors_reported


def test_each_picture_of_a_batch_is_made_by_one(
    start: Start, gpu: FakeGpu, monkeypatch: Any
) -> None:
    """A sampler runs for each, and once more for a high-resolution pass."""
    webui = start_timed(start, gpu, monkeypatch, 1.0)
    made: list[set[int]] = []
    webui.script_callbacks.on_cfg_denoiser(
        lambda params: made.append(set()) if params.denoiser.step == 0 else None
    )
    unet_of(webui).middle_block.register_forward_hook(lambda *_: made[-1].add(ours(webui)))
    webui.txt2img(*AUTO, n_iter=3)
    assert made == [{BLOCKS}, {0}, {BLOCKS}]
    webui.txt2img(*AUTO, enable_hr=True)
    assert made[3:] == [{BLOCKS}, {BLOCKS}]
    webui.txt2img(*AUTO, enable_hr=True)
    assert made[5:] == [{BLOCKS}, {0}]


def test_where_no_block_is_ours_nothing_is_compared(
    start: Start, gpu: FakeGpu, monkeypatch: Any
) -> None:
    """As of weights in float32."""
    webui = start_timed(start, gpu, monkeypatch, 9.9)
    unet_of(webui).float()
    unet_of(webui).dtype = webui.devices.dtype_unet = torch.float32
    for _ in range(PICTURES):
        assert TIMED not in webui.txt2img(*AUTO).comments
    assert not session_of(webui).trouble and not webui.errors_reported


def test_who_measures_ours_has_it(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    """As the speed test does; the next picture knows the verdict from its first step on."""
    webui = start_timed(start, gpu, monkeypatch, 9.9)
    plain = webui.txt2img(*WITHOUT)
    for _ in range(PICTURES + 1):
        webui.txt2img(*AUTO)
    with webui.library("hosts.webui.speedtest").ours():
        assert ours(webui) == BLOCKS
    assert same(webui.txt2img(*AUTO), plain) and untouched(webui)


def test_another_size_is_another_question(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = start_timed(start, gpu, monkeypatch, 9.9)
    for _ in range(PICTURES + 1):
        webui.txt2img(*AUTO)
    assert untouched(webui)
    webui.txt2img(*AUTO, width=144, height=104)
    assert ours(webui) == BLOCKS
    webui.txt2img(*AUTO)
    assert untouched(webui)


@pytest.mark.parametrize("what", ["level", "graphs", "attention"])
def test_what_is_chosen_later_is_another_question(
    start: Start, gpu: FakeGpu, monkeypatch: Any, what: str
) -> None:
    webui = start_timed(start, gpu, monkeypatch, 9.9)
    for _ in range(PICTURES + 1):
        webui.txt2img(*AUTO)
    assert untouched(webui)
    arguments = AUTO
    if what == "level":
        arguments = (True, "Memory", *AUTO[2:])
    elif what == "graphs":
        webui.shared.opts.set("rocm_sd_graphs", "On")
    else:
        webui.shared.opts.set("upcast_attn", True)
    webui.txt2img(*arguments)
    assert ours(webui) == BLOCKS and not webui.errors_reported


def test_the_same_picture_is_checked_in_the_same_places(
    start: Start, gpu: FakeGpu, monkeypatch: Any
) -> None:
    """Also after one of another size, which was the WebUI's."""
    monkeypatch.delenv("ROCM_SD_SPOT_CHECK")
    webui = start_timed(start, gpu, monkeypatch, 9.9)
    for _ in range(PICTURES + 1):
        webui.txt2img(*AUTO, width=136, seed=1)
    monkeypatch.setattr(
        webui.library("modules.faster"), "begin", lambda device: lambda: lambda: 1.0
    )
    first, _, third = (webui.txt2img(*AUTO, seed=2) for _ in range(3))
    assert ours(webui) == BLOCKS and same(third, first)
    webui.txt2img(*AUTO, width=136, seed=1)
    assert untouched(webui) and same(webui.txt2img(*AUTO, seed=2), first)
    assert session_of(webui)._taken.spot.compared


def test_the_faster_way_stays_and_makes_the_same_picture_again(
    start: Start, gpu: FakeGpu, monkeypatch: Any
) -> None:
    webui = start_timed(start, gpu, monkeypatch, 1.0)
    first, _, *others = (webui.txt2img(*AUTO) for _ in range(PICTURES))
    assert ours(webui) == BLOCKS and not session_of(webui).trouble
    assert all(same(each, first) for each in others)
    assert f"{BLOCKS} of {BLOCKS} blocks" in first.info and not webui.errors_reported


def test_off_amid_it_gives_everything_back(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = start_timed(start, gpu, monkeypatch, 9.9)
    expected, before = webui.txt2img(False), bytes_of(webui)
    for _ in range(PICTURES + 1):
        webui.txt2img(*AUTO)
        assert same(webui.txt2img(False), expected)
        assert untouched(webui) and bytes_of(webui) == before and not hooks_of(webui)


def test_a_forward_of_another_is_ours_and_not_timed(
    start: Start, gpu: FakeGpu, monkeypatch: Any
) -> None:
    """As sd-webui-controlnet's, also where the host was to be timed next."""
    webui = start_timed(start, gpu, monkeypatch, 9.9)
    webui.txt2img(*AUTO)
    assert session_of(webui).timed._contest is not None
    unet = unet_of(webui)
    unet.forward = unet.forward
    try:
        for _ in range(3):
            webui.txt2img(*AUTO)
            assert ours(webui) == BLOCKS and not hooks_of(webui)
    finally:
        del unet.forward
    assert TIMED in webui.txt2img(*AUTO).comments
    unet.forward = unet.forward
    try:
        webui.txt2img(*AUTO)
        assert ours(webui) == BLOCKS
    finally:
        del unet.forward


def test_pictures_of_the_speed_test_are_ours(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = start_timed(start, gpu, monkeypatch, 9.9)
    for _ in range(PICTURES + 1):
        webui.txt2img(*AUTO)
    seen: list[int] = []
    unet_of(webui).middle_block.register_forward_hook(lambda *_: seen.append(ours(webui)))
    job = webui.library("lab.speed_job")
    wish = job.PictureWish(3, 64, True, True, lambda share: None, lambda: False)
    side = webui.library("hosts.webui.speedtest").side
    with side.queue():
        side.image(wish)
    assert seen == [BLOCKS] * 3 and not webui.errors_reported


@pytest.mark.parametrize("by", ["environment", "setting"])
def test_it_can_be_switched_off(start: Start, gpu: FakeGpu, monkeypatch: Any, by: str) -> None:
    webui = start_timed(start, gpu, monkeypatch, 9.9)
    for _ in range(PICTURES + 1):
        webui.txt2img(*AUTO)
    assert untouched(webui)
    if by == "environment":
        monkeypatch.setenv("ROCM_SD_COMPARE_SPEED", "0")
    else:
        webui.shared.opts.set("rocm_sd_compare_speed", False)
    webui.txt2img(*AUTO)
    assert ours(webui) == BLOCKS and not hooks_of(webui)
