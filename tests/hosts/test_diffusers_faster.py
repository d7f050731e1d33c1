"""Models of diffusers that are slower with ours are torch's own, by played times."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib_rocm_sd.cards.batch import GuidanceSplit
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.lab.model_cases import CASES, Scene
from lib_rocm_sd.modules import faster
from lib_rocm_sd.policy import MEMORY
from lib_rocm_sd.report import Report
from tests.vae.vae_models import needs_half

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

from lib_rocm_sd.hosts.diffusers import faster as hosted
from lib_rocm_sd.hosts.diffusers import pipeline as host
from lib_rocm_sd.hosts.diffusers.patch import Exchanging

pytestmark = [needs_half, pytest.mark.usefixtures("fresh_cache", "card")]
CPU, PICTURES = torch.device("cpu"), 5
"""Enough for two of both sides, and one of who is faster."""
SLOWER = (
    *("SD 1.5, LoRA", "SD 1.5, LoRA, fused", "SD 1.5, IP-Adapter", "SD 1.5, ControlNet"),
    *("SD 1.5, mask for the prompt", "SD 1.5, fused projections", "x4 upscaler", "Kandinsky 2.2"),
    *("PixArt-Alpha 512x512", "SD 3, six blocks", "SD 3.5 medium, six blocks"),
)
MS = {"ours": 9.9, "theirs": 5.5}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that plays one, on which ours takes longer. One call of a picture is timed."""
    monkeypatch.delenv(faster.VARIABLE)
    monkeypatch.setattr(faster, "is_compared_on", lambda device: True)
    monkeypatch.setattr(faster, "SETTLING", {True: 1, False: 1})
    monkeypatch.setattr(faster, "TIMED", 1)
    monkeypatch.setattr(faster, "_kinds", {})

    def begin(device: torch.device) -> Callable[[], Callable[[], float]]:
        ms = MS["ours" if any(map(is_ours, Pipeline.last.modules())) else "theirs"]
        return lambda: lambda: ms

    monkeypatch.setattr(faster, "begin", begin)


def scene_of(name: str) -> Scene:
    case = next(case for case in CASES if case.name == name)
    if case.missing():
        pytest.skip(case.missing())
    return case.scene(CPU, torch.bfloat16, small=True)


class Pipeline(SimpleNamespace):
    """A scene's models, with a scheduler that makes other timesteps for each picture. `ours`: who
    made each picture.
    """

    last: Pipeline

    def __init__(self, scene: Scene) -> None:
        super().__init__(**scene.parts, scheduler=SimpleNamespace(timesteps=None))
        self.scene, self.ours = scene, list[bool]()
        Pipeline.last = self

    def pictures(self, count: int = 1, steps: int = 2) -> list[torch.Tensor]:
        """What the steps of each give, which are all alike and so made by the same."""
        made = []
        with torch.no_grad():
            for _ in range(count):
                self.scheduler.timesteps = torch.arange(steps)
                first, *others = [self.scene.step() for _ in range(steps)]
                assert all(torch.equal(each, first) for each in others)
                made.append(first)
                self.ours.append(any(map(is_ours, self.modules())))
        return made

    def modules(self) -> list[Any]:
        return [module for part in self.scene.parts.values() for module in part.modules()]


def is_ours(module: Any) -> bool:
    forward = type(vars(module).get("forward")).__name__
    ours = forward in ("BlockStandIn", "ServedForward")
    return ours or type(getattr(module, "processor", None)) is host.EngineAttnProcessor


@pytest.mark.parametrize("name", SLOWER)
def test_the_slower_way_is_not_taken(name: str) -> None:
    scene, report = scene_of(name), Report()
    pipeline = Pipeline(scene)
    (theirs,) = pipeline.pictures()
    models = {type(part).__name__ for part in scene.parts.values()}
    processors = [m.processor for part in scene.parts.values() for m in attentions(part)]
    with host.patched(pipeline, unet=True, session=Session(report=report)) as patch:
        made = pipeline.pictures(PICTURES)
        assert pipeline.ours[1:] == [True, False, True, False, False]
        assert all(torch.equal(made[number], theirs) for number in (1, 3, 4))
        assert torch.equal(made[0], made[2]) and set(patch.slower) == models
        now = [m.processor for part in scene.parts.values() for m in attentions(part)]
        assert all(a is b for a, b in zip(now, processors, strict=True))
    told = [event for event in report.snapshot()["events"] if "is faster here" in event]
    assert len(told) == len(models) and all("5.5 ms for 9.9" in each for each in told)
    with host.patched(pipeline, unet=True) as patch:  # known, in this process and the next one
        assert torch.equal(pipeline.pictures()[0], theirs) and set(patch.slower) == models
    assert torch.equal(pipeline.pictures()[0], theirs)
    assert not any("forward" in vars(m) or m._forward_hooks for m in pipeline.modules())


def attentions(part: Any) -> list[Any]:
    return [module for module in part.modules() if hasattr(module, "processor")]


@pytest.fixture
def pixart() -> Pipeline:
    return Pipeline(scene_of("PixArt-Alpha 512x512"))


def test_it_is_said_whose_attention_is_faster(pixart: Pipeline) -> None:
    with host.patched(pixart) as patch:
        pixart.pictures(PICTURES)
        why = "torch's attention is faster here, 5.5 ms for 9.9"
        assert patch.slower == {"PixArtTransformer2DModel": [why]}


def test_a_with_block_for_each_picture(pixart: Pipeline) -> None:
    for _ in range(PICTURES):
        with host.patched(pixart):
            pixart.pictures()
    assert pixart.ours == [True, False, True, False, False]


@pytest.mark.parametrize("off", ["variable", "argument"])
def test_it_can_be_switched_off(
    pixart: Pipeline, off: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if off == "variable":
        monkeypatch.setenv(faster.VARIABLE, "0")
    with host.patched(pixart, compare=off == "variable") as patch:
        pixart.pictures(PICTURES)
        assert not patch.slower and not patch.contests
        assert not any(m._forward_pre_hooks for m in pixart.modules()) and all(pixart.ours)


def test_ours_that_is_faster_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MS, "ours", 1.0)
    pipeline = Pipeline(scene_of("SD 1.5"))
    with host.patched(pipeline, unet=True) as patch:
        first, theirs, *others = pipeline.pictures(PICTURES)
        assert all(torch.equal(each, first) for each in others) and not patch.slower
        assert not torch.equal(theirs, first)
        assert all(row.ours == row.total for row in patch.unet.rows())


def test_without_a_scheduler_ours_stays() -> None:
    scene = scene_of("SD 1.5")
    with host.patched(SimpleNamespace(**scene.parts), unet=True) as patch, torch.no_grad():
        made = [scene.step() for _ in range(8)]
        assert all(torch.equal(each, made[0]) for each in made) and not patch.slower
        assert all(row.ours == row.total for row in patch.unet.rows())


def test_another_level_is_another_question(pixart: Pipeline) -> None:
    with host.patched(pixart) as patch:
        pixart.pictures(PICTURES)
        assert patch.slower
    with host.patched(pixart, session=Session(MEMORY)) as patch:
        pixart.pictures()
        assert pixart.ours[-2:] == [False, True] and not patch.slower


@pytest.mark.parametrize(
    "split", [Exchanging, lambda forward: GuidanceSplit.__new__(GuidanceSplit)]
)
def test_forwards_that_ranks_share_are_not_compared(pixart: Pipeline, split: Any) -> None:
    """Each would decide by itself, by times in which it waits for the others."""
    model = pixart.transformer
    model.forward = split(model.forward)
    with host.patched(pixart) as patch:
        (contest,) = patch.contests.values()
        with torch.no_grad():
            contest.before(object(), (), {"hidden_states": torch.zeros(2, 4, 8, 8)})(True)
    assert not faster._kinds


def test_offloading_amid_it_costs_no_hook(pixart: Pipeline) -> None:
    """It replaces the model's forward and puts another back, before and after each picture."""
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    model = pixart.transformer
    with host.patched(pixart) as patch:
        for _ in range(PICTURES):
            hooks.add_hook_to_module(model, hooks.ModelHook())
            pixart.pictures()
            hooks.remove_hook_from_module(model)
        assert patch.slower and pixart.ours == [True, False, True, False, False]
    assert not model._forward_hooks


def test_a_copy_or_what_is_pickled_is_not_timed(pixart: Pipeline) -> None:
    model = pixart.transformer
    with host.patched(pixart) as patch:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
            pixart.scene.parts["transformer"] = other
            pixart.pictures(PICTURES)
            assert not patch.slower and not any(pixart.ours)
    assert not model._forward_hooks


def test_inside_another_with(pixart: Pipeline) -> None:
    with host.patched(pixart) as outer, host.patched(pixart) as inner:
        pixart.pictures(PICTURES)
        assert outer.slower and not inner.contests


def test_a_processor_that_somebody_sets_meanwhile_stays(pixart: Pipeline) -> None:
    other = diffusers.models.attention_processor.AttnProcessor()
    attn = pixart.transformer.transformer_blocks[0].attn1
    with host.patched(pixart) as patch:
        pixart.pictures()
        attn.processor = other
        pixart.pictures(PICTURES)
        assert patch.slower and attn.processor is other
    assert attn.processor is other


def test_what_fails_in_a_switch_costs_no_step(
    pixart: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any) -> None:
        raise RuntimeError("no room")

    report = Report()
    with host.patched(pixart, session=Session(report=report)) as patch:
        ours = patch.contests["PixArtTransformer2DModel"]
        monkeypatch.setattr(hosted.Attentions, "take_out", fails)
        pixart.pictures(2)
        monkeypatch.undo()
        assert not ours.holds
    assert any("no room" in event for event in report.snapshot()["events"])


@pytest.mark.parametrize("when", ["begin", "end"])
def test_what_fails_in_timing_costs_no_step(
    pixart: Pipeline, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    report, begin = Report(), faster.begin
    fails = (lambda device: 1 // 0) if when == "begin" else lambda device: lambda: 1 // 0
    with host.patched(pixart, session=Session(report=report)):
        monkeypatch.setattr(faster, "begin", fails)
        pixart.pictures()
        monkeypatch.setattr(faster, "begin", begin)
        pixart.pictures(2)
    assert any("not timed: ZeroDivisionError" in each for each in report.snapshot()["events"])
    assert pixart.ours == [True, True, False]


def test_an_interrupted_call_ends(pixart: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch does not tell its hooks of a call that Ctrl-C has ended."""

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    inside: list[bool] = []

    @contextmanager
    def without_search() -> Any:
        inside.append(True)
        yield
        inside.pop()

    monkeypatch.setattr(faster, "without_search", without_search)
    with host.patched(pixart) as patch:
        pixart.pictures()
        hook = pixart.transformer.proj_out.register_forward_pre_hook(interrupted)
        with pytest.raises(KeyboardInterrupt):
            pixart.pictures()
        hook.remove()
        assert inside
        pixart.pictures(PICTURES - 1)
        assert patch.slower and not inside
    assert pixart.ours == [True, False, True, False, False]
