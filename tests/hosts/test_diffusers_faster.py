"""Models of diffusers that are slower with ours are torch's own, by played times."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.lab.model_cases import CASES, Scene
from lib_rocm_sd.modules import faster
from lib_rocm_sd.report import Report
from tests.vae.vae_models import needs_half

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

from lib_rocm_sd.hosts.diffusers import faster as hosted
from lib_rocm_sd.hosts.diffusers import pipeline as host

pytestmark = [needs_half, pytest.mark.usefixtures("fresh_cache", "card")]
CPU, STEPS = torch.device("cpu"), 10
SLOWER = (
    *("SD 1.5, LoRA", "SD 1.5, LoRA, fused", "Kandinsky 2.2", "PixArt-Alpha 512x512", "SD 3"),
    "SD 1.5, ControlNet",
)
MS = {"ours": 9.9, "theirs": 5.5}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that plays one, on which ours takes longer. Of each turn one call is timed."""
    monkeypatch.setenv(faster.VARIABLE, "1")
    monkeypatch.setattr(faster, "is_card", lambda device: True)
    monkeypatch.setattr(faster, "SETTLING", {True: 1, False: 1})
    monkeypatch.setattr(faster, "TIMED", 1)
    places: list[Any] = []
    switch = hosted._Ours.switch

    def switched(ours: Any, now: bool) -> None:
        places[:] = [] if now else [ours]
        switch(ours, now)

    def begin(device: torch.device) -> Callable[[], Callable[[], float]]:
        ms = MS["theirs"] if places else MS["ours"]
        return lambda: lambda: ms

    monkeypatch.setattr(hosted._Ours, "switch", switched)
    monkeypatch.setattr(faster, "begin", begin)


def scene_of(name: str) -> Scene:
    case = next(case for case in CASES if case.name == name)
    if case.missing():
        pytest.skip(case.missing())
    return case.scene(CPU, torch.bfloat16, small=True)


def steps(scene: Scene, count: int = 1) -> torch.Tensor:
    with torch.no_grad():
        for _ in range(count):
            made = scene.step()
    return made


def patched(scene: Scene, **options: Any) -> Any:
    return host.patched(SimpleNamespace(**scene.parts), unet=True, **options)


@pytest.mark.parametrize("name", SLOWER)
def test_the_slower_way_is_not_taken(name: str) -> None:
    scene, report = scene_of(name), Report()
    theirs = steps(scene)
    models = {type(part).__name__ for part in scene.parts.values()}
    processors = [m.processor for part in scene.parts.values() for m in attentions(part)]
    with patched(scene, session=Session(report=report)) as patch:
        steps(scene, STEPS)
        assert set(patch.slower) == models
        assert torch.equal(steps(scene), theirs)
        now = [m.processor for part in scene.parts.values() for m in attentions(part)]
        assert all(a is b for a, b in zip(now, processors, strict=True))
    told = [event for event in report.snapshot()["events"] if "is faster here" in event]
    assert len(told) == len(models) and all("5.5 ms for 9.9" in each for each in told)
    with patched(scene) as patch:  # known, in this process and the next one
        assert torch.equal(steps(scene), theirs) and set(patch.slower) == models
    assert torch.equal(steps(scene), theirs)
    assert not any("forward" in vars(m) for part in scene.parts.values() for m in part.modules())


def attentions(part: Any) -> list[Any]:
    return [module for module in part.modules() if hasattr(module, "processor")]


@pytest.fixture
def pixart() -> Scene:
    return scene_of("PixArt-Alpha 512x512")


@pytest.mark.parametrize("off", ["variable", "argument"])
def test_it_can_be_switched_off(pixart: Scene, off: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if off == "variable":
        monkeypatch.setenv(faster.VARIABLE, "0")
    with patched(pixart, compare=off == "variable") as patch:
        steps(pixart, STEPS)
        assert not patch.slower and not patch.contests
        assert not any("forward" in vars(m) for m in pixart.parts["transformer"].modules())


def test_ours_that_is_faster_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MS, "ours", 1.0)
    scene = scene_of("SD 1.5")
    with patched(scene) as patch:
        ours = steps(scene)
        assert torch.equal(steps(scene, STEPS), ours) and not patch.slower
        assert all(row.ours == row.total for row in patch.unet.rows())


def test_a_copy_or_what_is_pickled_has_torchs_forward(pixart: Scene) -> None:
    model = pixart.parts["transformer"]
    with patched(pixart):
        assert "forward" in vars(model)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
            assert type(other.forward).__name__ == "method"
        names = inspect.signature(model.forward).parameters
        assert list(names)[0] == "hidden_states" and "self" not in names
    assert "forward" not in vars(model)


def test_inside_another_with(pixart: Scene) -> None:
    with patched(pixart) as outer, patched(pixart) as inner:
        steps(pixart, STEPS)
        assert outer.slower and not inner.contests


def test_a_processor_that_somebody_sets_meanwhile_stays(pixart: Scene) -> None:
    other = diffusers.models.attention_processor.AttnProcessor()
    attn = pixart.parts["transformer"].transformer_blocks[0].attn1
    with patched(pixart) as patch:
        steps(pixart)
        attn.processor = other
        steps(pixart, STEPS)
        assert patch.slower and attn.processor is other
    assert attn.processor is other


def test_what_fails_in_a_switch_costs_no_step(
    pixart: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any) -> None:
        raise RuntimeError("no room")

    report = Report()
    with patched(pixart, session=Session(report=report)) as patch:
        ours = patch.contests["PixArtTransformer2DModel"]
        monkeypatch.setattr(hosted.Attentions, "take_out", fails)
        steps(pixart, STEPS)
        monkeypatch.undo()
        assert not ours.holds
    assert any("no room" in event for event in report.snapshot()["events"])
