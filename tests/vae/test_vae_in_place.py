"""Residual blocks that write their output over what they began with; images made in halves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.hosts.read.vae import read
from lib_rocm_sd.vae import bands, plan
from lib_rocm_sd.vae.plan import BandPlan, Leg
from lib_rocm_sd.vae.policy import Plans
from lib_rocm_sd.vae.steps import ConvStep
from lib_rocm_sd.vae.trace import Chain, peak_bytes
from tests.vae import vae_models
from tests.vae.vae_models import coder, error, fixed, image, needs_half, own

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MIN_ROWS", 16)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of outputs that were written over a shortcut."""
    found: list[tuple[int, ...]] = []
    conv = bands.conv

    def noted(*args: Any, **options: Any) -> Any:
        out, shortcut = options["out"], options["shortcut"]
        if out is not None:
            assert out.data_ptr() == shortcut.data_ptr()
            found.append(tuple(out.shape))
        return conv(*args, **options)

    monkeypatch.setattr(bands, "conv", noted)
    return found


def links(module: nn.Module, x: torch.Tensor) -> Chain:
    """The chain, with what our kernel would write in place for fp16."""
    plans = Plans(read(module.half()), torch.float16, vae_models.way)
    made = plans.planner((1, *x.shape[2:])).chain
    module.double()
    return made


def whole(module: nn.Module) -> BandPlan:
    return BandPlan((Leg(0, len(read(module).steps), None, "output"),), 0, 0, 0.0, 1)


@pytest.mark.parametrize("kind", vae_models.KINDS)
def test_in_place_gives_the_same(kind: str, written: list[tuple[int, ...]]) -> None:
    module = coder(kind)
    x = image(kind, 12, 7).double()
    found = links(module, x)
    assert found.in_place and not found.halved
    expected = own(module, x)
    assert error(fixed(module, whole(module), found)(x), expected) < 1e-12
    assert len(written) == len(found.in_place)


@pytest.mark.parametrize("kind", ["ldm decoder", "ldm encoder"])
def test_in_place_in_bands(kind: str, written: list[tuple[int, ...]]) -> None:
    """Only what a band makes itself is written over, never what is stored."""
    module = coder(kind)
    x = image(kind, 24, 5).double()
    found = links(module, x)
    last = len(read(module).steps)
    first = 6 if kind == "ldm decoder" else 3
    legs: tuple[Leg, ...] = (Leg(0, first, None, "device"), Leg(first, last, 16, "output"))
    if kind == "ldm encoder":  # its attention is made whole
        middle = next(i for i, s in enumerate(read(module).steps) if not isinstance(s, ConvStep))
        legs = (legs[0], Leg(first, middle, 16, "host"), Leg(middle, last, None, "output"))
    got = fixed(module, BandPlan(legs, 0, 0, 0.0, 1), found)(x)
    assert error(got, own(module, x)) < 1e-12
    assert len(set(written)) > 1


def test_what_is_needed_later_is_not_written_over() -> None:
    made = links(coder("ldm decoder"), image("ldm decoder", 24, 5))
    everything = made.rows(made.last)
    assert {a.image for a in made.actions(made.last, everything, frozenset({0})) if a.in_place} == (
        made.in_place
    )
    for image_, step in enumerate(made.steps, 1):
        if step.residual:  # a block alone, from what is stored, or to be kept narrower
            (last,) = made.actions(image_, made.rows(image_), frozenset({image_ - 2}))[-1:]
            assert last.image == image_ and not last.in_place
    narrow = [i for i in made.in_place if made.sizes[i].channels < made.sizes[i - 2].channels]
    assert narrow
    for image_ in narrow:
        assert not made.actions(image_, made.rows(image_), frozenset({0}))[-1].in_place


@needs_half
@pytest.mark.parametrize("kind", ["ldm decoder", "ldm encoder", "diffusers decoder"])
@pytest.mark.parametrize("rows", [8, 9, 13])
def test_in_halves_gives_the_same_to_the_bit(
    kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = coder(kind).half(), image(kind, rows, 7).half()
    at_once = fixed(module, whole(module))(x)
    monkeypatch.setattr(plan, "HALVED_BYTES", 0)
    monkeypatch.setattr(plan, "alive_bytes", lambda chain, actions: [0] * len(actions))
    found = links(module, x)
    assert len(found.halved) > 5 and found.halved & found.in_place
    module.half()
    called: list[object] = []
    conv = bands.conv
    monkeypatch.setattr(bands, "conv", lambda *a, **k: called.append(a) or conv(*a, **k))  # type: ignore[func-returns-value]
    assert torch.equal(fixed(module, whole(module), found)(x), at_once)
    high = [i for i in found.halved if found.sizes[i].height > 16]
    convs = sum(isinstance(step, ConvStep) for step in found.steps)
    assert len(called) == convs + len(high) and high


@pytest.mark.parametrize("gfx", ["sm_80", "gfx942", "gfx1100"])
def test_a_megapixel_takes_three_quarters_of_what_it_took(gfx: str) -> None:
    """Two images of 128 channels beside one of 128 or 256, and statistics: 768 MiB and some."""
    recipe = vae_models.standard("decoder")
    plans = Plans(recipe, torch.float16, lambda problem: vae_models.way(problem, gfx))
    planner = plans.planner((1, 128, 128))
    peak = planner.whole().peak_bytes
    assert 768 * MIB < peak <= 800 * MIB
    apart = Plans(recipe, torch.float16, vae_models.torchs).planner((1, 128, 128)).chain
    assert not apart.in_place
    actions = apart.actions(apart.last, apart.rows(apart.last), frozenset({0}))
    assert peak_bytes(apart, actions) == 1024 * MIB


def test_only_what_one_config_makes_either_way_is_made_in_place() -> None:
    """Bands, which may not be in place, must give the same bits."""
    recipe = vae_models.standard("decoder")
    made = Plans(recipe, torch.float16, vae_models.way).planner((1, 64, 64)).chain
    shortcuts = {
        image_: recipe.steps[image_ - 1].out_channels
        for image_ in range(2, made.last + 1)
        if recipe.steps[image_ - 1].residual and getattr(recipe.steps[image_ - 1], "shortcut", None)
    }
    assert sorted(shortcuts.values()) == [128, 256]
    assert [shortcuts[image_] for image_ in shortcuts if image_ in made.in_place] == [128]
