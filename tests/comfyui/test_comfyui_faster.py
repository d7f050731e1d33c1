"""A UNet's blocks are ComfyUI's where these are faster, by played times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd.hosts.comfyui import unet as host
from lib_rocm_sd.hosts.comfyui.host import tally
from lib_rocm_sd.modules import faster
from tests.comfyui import unet_steps
from tests.comfyui.conftest import left
from tests.comfyui.unet_steps import TOTALS, counts, forwards, near, step, strides, with_ours
from tests.unet.unet_models import draw

pytestmark = pytest.mark.usefixtures("fresh_cache", "blocks")
PICTURES = 4
"""Two of both sides, of which one call each is timed."""
MS = {"ours": 9.9, "theirs": 5.5}
WHY = "ComfyUI's own code is faster here, 5.5 ms for 9.9"


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    monkeypatch.delenv(faster.VARIABLE)
    monkeypatch.setattr(faster, "is_compared_on", lambda device: True)
    monkeypatch.setattr(faster, "SETTLING", {True: 1, False: 1})
    monkeypatch.setattr(faster, "TIMED", 1)
    monkeypatch.setattr(faster, "_kinds", {})

    def begin(device: torch.device) -> Callable[[], Callable[[], float]]:
        ms = MS["ours" if forwards(model) else "theirs"]
        return lambda: lambda: ms

    monkeypatch.setattr(faster, "begin", begin)


def picture(model: Any, *given: Any) -> torch.Tensor:
    """What the steps of a sampler's run give, which are all alike."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unet_steps, "SIGMAS", torch.ones(3))
        first, *others = [step(model, *given) for _ in range(3)]
    assert all(torch.equal(each, first) for each in others)
    return first


def test_the_slower_way_is_not_taken(model: Any) -> None:
    theirs, before, clone = picture(model), strides(model), with_ours(model)
    made = [picture(clone) for _ in range(PICTURES)]
    assert [torch.equal(each, theirs) for each in made] == [False, True, False, True]
    assert near(made[0], theirs) and torch.equal(made[0], made[2])
    assert torch.equal(picture(clone), theirs)
    assert strides(model) == before and not forwards(model)
    assert left()[f"UNet: {WHY}"] == 3


def test_a_verdict_that_is_kept_holds_from_the_first_step_on(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = with_ours(model)
    for _ in range(PICTURES + 1):
        picture(clone)
    monkeypatch.setattr(faster, "_kinds", {})
    host._known.clear()
    assert torch.equal(picture(clone), picture(model))


def test_another_size_is_another_question(model: Any) -> None:
    clone = with_ours(model)
    for _ in range(PICTURES + 1):
        picture(clone)
    large, tally_before = draw(2, 4, 16, 8), tally.ours["UNet"]
    theirs = picture(model, large)
    assert near(picture(clone, large), theirs) and tally.ours["UNet"] > tally_before
    assert counts() == TOTALS


def test_another_level_is_another_question(model: Any) -> None:
    theirs = picture(model)
    for _ in range(PICTURES + 1):
        picture(with_ours(model))
    assert torch.equal(picture(with_ours(model)), theirs)
    assert near(picture(with_ours(model, "Memory")), theirs)


def test_who_measures_ours_has_it(model: Any) -> None:
    theirs, clone = picture(model), with_ours(model)
    for _ in range(PICTURES + 1):
        picture(clone)
    with faster.ours_whatever():
        assert near(picture(clone), theirs) and counts() == TOTALS
    assert torch.equal(picture(clone), theirs)


def test_the_faster_way_stays(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MS, "ours", 1.0)
    theirs, clone = picture(model), with_ours(model)
    for _ in range(2):
        picture(clone)
    assert near(picture(clone), theirs) and counts() == TOTALS
    assert not any("faster" in why for why in left())


def test_without_a_run_ours_stays(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unet_steps, "SIGMAS", None)
    theirs, clone = step(model), with_ours(model)
    assert all(near(step(clone), theirs) for _ in range(12))


def test_where_ours_cannot_run_nothing_is_timed(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "unusable", lambda device: ["it is not tried yet"])
    theirs, clone = picture(model), with_ours(model)
    assert all(torch.equal(picture(clone), theirs) for _ in range(PICTURES))
    assert not faster._kinds
    monkeypatch.undo()
    assert not any("faster" in why for why in left())


def test_where_no_block_is_ours_nothing_is_compared(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = host.UnetTakeover.report
    monkeypatch.setattr(
        host.UnetTakeover, "report", lambda self: [replace(row, ours=0) for row in report(self)]
    )
    theirs, clone = picture(model), with_ours(model)
    assert all(near(picture(clone), theirs) for _ in range(PICTURES))


def test_an_error_of_comfyuis_is_passed_on(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise InterruptedError

    clone = with_ours(model)
    picture(clone)
    unet = type(model.model.diffusion_model)
    with monkeypatch.context() as patch:
        patch.setattr(unet, "forward", fails)
        with pytest.raises(InterruptedError):
            picture(clone)
    for _ in range(PICTURES):
        picture(clone)
    assert torch.equal(picture(clone), picture(model))


def test_what_fails_in_timing_costs_no_step(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(device: torch.device) -> Callable[[], float]:
        return lambda: 1 // 0

    monkeypatch.setattr(faster, "begin", begin)
    theirs = picture(model)
    assert near(picture(with_ours(model)), theirs)
    assert any("it is not timed: ZeroDivisionError" in why for why in left())


def test_it_can_be_switched_off(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faster.VARIABLE, "0")
    theirs, clone = picture(model), with_ours(model)
    assert all(near(picture(clone), theirs) for _ in range(PICTURES))
