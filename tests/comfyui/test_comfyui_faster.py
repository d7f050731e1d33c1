"""A UNet's blocks are ComfyUI's where these are faster, by played times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lib_rocm_sd.hosts.comfyui.host import tally
from lib_rocm_sd.modules import faster
from tests.comfyui.conftest import left
from tests.comfyui.unet_steps import TOTALS, counts, forwards, near, step, strides, with_ours
from tests.unet.unet_models import draw

pytestmark = pytest.mark.usefixtures("fresh_cache", "blocks")
STEPS = 12
MS = {"ours": 9.9, "theirs": 5.5}
WHY = "the host's own is faster here, 5.5 ms for 9.9"


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Have one call of each turn timed."""
    monkeypatch.setenv(faster.VARIABLE, "1")
    monkeypatch.setattr(faster, "is_card", lambda device: True)
    monkeypatch.setattr(faster, "SETTLING", {True: 1, False: 1})
    monkeypatch.setattr(faster, "TIMED", 1)

    def begin(device: torch.device) -> Callable[[], Callable[[], float]]:
        ms = MS["ours" if forwards(model) else "theirs"]
        return lambda: lambda: ms

    monkeypatch.setattr(faster, "begin", begin)


def test_the_slower_way_is_not_taken(model: Any) -> None:
    theirs, before = step(model), strides(model)
    clone = with_ours(model)
    for _ in range(STEPS):
        made = step(clone)
        assert near(made, theirs) or torch.equal(made, theirs)
    assert torch.equal(step(clone), theirs)
    assert strides(model) == before and not forwards(model)
    assert left()[f"UNet: {WHY}"] >= 1


def test_another_size_is_another_question(model: Any) -> None:
    clone = with_ours(model)
    for _ in range(STEPS):
        step(clone)
    large, tally_before = draw(2, 4, 16, 8), tally.ours["UNet"]
    theirs = step(model, large)
    step(clone, large)
    assert near(step(clone, large), theirs) and tally.ours["UNet"] > tally_before
    assert counts() == TOTALS


def test_who_measures_ours_has_it(model: Any) -> None:
    theirs, clone = step(model), with_ours(model)
    for _ in range(STEPS):
        step(clone)
    with faster.ours_whatever():
        assert near(step(clone), theirs) and counts() == TOTALS
    assert torch.equal(step(clone), theirs)


def test_the_faster_way_stays(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MS, "ours", 1.0)
    theirs, clone = step(model), with_ours(model)
    for _ in range(STEPS):
        step(clone)
    assert near(step(clone), theirs) and counts() == TOTALS
    assert not any("faster" in why for why in left())


def test_an_error_of_comfyuis_is_passed_on(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise InterruptedError

    clone = with_ours(model)
    for _ in range(3):
        step(clone)
    unet = type(model.model.diffusion_model)
    with monkeypatch.context() as patch:
        patch.setattr(unet, "forward", fails)
        with pytest.raises(InterruptedError):
            step(clone)
    for _ in range(STEPS):
        step(clone)
    assert torch.equal(step(clone), step(model))


def test_it_can_be_switched_off(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faster.VARIABLE, "0")
    theirs, clone = step(model), with_ours(model)
    for _ in range(STEPS):
        assert near(step(clone), theirs)
