"""Blocks of ours compared with the host's own, now and then, while pictures are made."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.modules import compared
from lib_rocm_sd.report import Report
from lib_rocm_sd.unet import spot
from lib_rocm_sd.unet.hook import Hook
from lib_rocm_sd.unet.takeover import UnetTakeover, take_over
from tests.unet import unet_models as models
from tests.unet.looking import BF16, near, rows

KINDS = 5
"""Kinds of blocks whose calls come to us: transformer blocks are parts of their transformers."""


@pytest.fixture(autouse=True)
def _compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(compared.VARIABLE)


def taken_over(unet: Any, hook: Hook | None = None) -> UnetTakeover:
    return take_over(unet, Session.of("Auto", report=Report()), hook)


def step_by(unet: Any, inputs: Any, count: int) -> list[torch.Tensor]:
    return [models.step(unet, inputs).clone() for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_one_block_of_each_kind_is_compared_in_a_generation(dtype: torch.dtype) -> None:
    unet = models.ldm_unet(depth=1).to(dtype)
    inputs = models.in_dtype(models.ldm_inputs(), dtype)
    taken = taken_over(unet)
    for turn in range(4):
        taken.generation_begins(turn, steps=5)
        before = taken.spot.compared
        step_by(unet, inputs, 5)
        taken.spot.look(wait=True)
        assert taken.spot.compared == before + KINDS
    assert not taken.spot.left
    assert all(row.ours == row.total for row in taken.report())


def test_the_same_turn_makes_the_same_picture(unet: Any, inputs: Any) -> None:
    taken, made = taken_over(unet), []
    for turn in (7, 7, 8):
        taken.generation_begins(turn, steps=3)
        made.append(step_by(unet, inputs, 3))
    assert all(map(torch.equal, made[0], made[1]))
    assert not all(map(torch.equal, made[0], made[2]))


def test_the_hosts_own_forward_runs_once_and_its_result_is_used(unet: Any, inputs: Any) -> None:
    """What sits in it draws its random numbers once, and keeps its state."""
    taken, plain, seen = taken_over(unet), models.step(unet, inputs), []
    own, block = nn.Sequential.forward, unet.middle_block[0].out_layers

    def counted(self: Any, x: Any) -> Any:
        made = own(self, x)
        if self is block:
            seen.append(made)
        return made

    # Past what is watched: the class's forward keeps its identity.
    taken.spot.begin([each for each in taken.stand_ins if each.module is unet.middle_block[0]], 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taken.stand_ins[0].reading.watch.__class__, "same", lambda self: True)
        patch.setattr(nn.Sequential, "forward", counted)
        results = step_by(unet, inputs, 2)
    assert len(seen) == 1 and all(near(made, plain) for made in results)


def unnoticed(monkeypatch: pytest.MonkeyPatch, module: nn.Module) -> None:
    """What a module computes becomes another, in a way that nothing watches."""
    own = nn.functional.layer_norm
    weight: Any = module.weight

    def doubled(x: Any, shape: Any, given: Any, *more: Any) -> Any:
        made = own(x, shape, given, *more)
        return made * 2 if given is weight else made

    monkeypatch.setitem(nn.LayerNorm.forward.__globals__, "F", _Functions(doubled))


class _Functions:
    def __init__(self, layer_norm: Any) -> None:
        self.layer_norm = layer_norm

    def __getattr__(self, name: str) -> Any:
        return getattr(nn.functional, name)


def test_a_kind_that_differs_is_the_hosts_until_the_next_generation(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = taken_over(unet)
    block = next(m for m in unet.modules() if type(m).__name__ == "BasicTransformerBlock")
    name = next(n for n, m in unet.named_modules() if block in m.children() and n).rsplit(".", 1)[0]
    with monkeypatch.context() as patch:
        unnoticed(patch, block.norm2)
        theirs = [each for each in taken.stand_ins if each.kind.title == "transformer"]
        taken.spot.begin(theirs, 0, steps=1)
        models.step(unet, inputs)
        expected = models.step(unet, inputs)
        left = rows(taken)
        assert left["transformer"].ours == left["transformer block"].ours == 0
        (why,) = left["transformer"].left
        assert why.startswith(f"{name} differed by") and "rounding explains" in why
        assert why.endswith("nothing that is looked at has changed")
        assert left["residual block"].ours == left["residual block"].total
        assert any(why in event for event in taken._session.report.snapshot()["events"])
        taken.give_back()
        assert near(models.step(unet, inputs), expected)
        taken.take_over()
    taken.generation_begins(1)
    assert all(row.ours == row.total for row in taken.report())


def test_nobody_says_when_a_generation_begins(unet: Any, inputs: Any) -> None:
    """Then it makes no difference to a picture where it is compared."""
    taken = taken_over(unet)
    made = step_by(unet, inputs, 3 * spot.STEPS)
    assert taken.spot.compared in (2 * KINDS, 3 * KINDS)
    assert all(torch.equal(made[0], each) for each in made)


def test_blocks_that_call_modules_of_the_host_are_passed_over(inputs: Any) -> None:
    """Else whatever sits in these would run twice."""
    unet = models.ldm_unet(depth=1).to(BF16)
    seen: list[int] = []

    class Theirs(Hook):
        def attention(self, module: Any) -> str:
            return "attention is the host's" if module is first.attn2 else ""

    first = next(m for m in unet.modules() if type(m).__name__ == "BasicTransformerBlock")
    own = first.attn2.forward
    taken = taken_over(unet, Theirs())

    def counted(*given: Any, **named: Any) -> Any:
        seen.append(1)
        return own(*given, **named)

    first.attn2.forward = counted
    for turn in range(4):
        taken.generation_begins(turn, steps=4)
        step_by(unet, inputs, 4)
    assert len(seen) == 16
    assert taken.spot.compared == 4 * KINDS  # another transformer in its place
    assert not taken.spot.left


def test_a_prompt_is_made_anew_in_the_step_after_a_comparison() -> None:
    """Writes through .data are counted nowhere: what a step made of its prompt ends with it."""
    unet = models.diffusers_unet("SDXL").to(BF16)
    inputs = models.in_dtype(models.diffusers_inputs("SDXL"), BF16)
    taken = taken_over(unet)
    step_by(unet, inputs, 2)
    last = [each for each in taken.stand_ins if each.kind.title == "transformer"][-1]
    taken.spot.begin([last], 0, steps=1)
    models.step(unet, inputs)
    assert taken.spot.compared
    for block in (m for m in unet.modules() if type(m).__name__ == "BasicTransformerBlock"):
        block.attn2.to_k.weight.data.mul_(3)
    ours = models.step(unet, inputs)
    taken.give_back()
    assert near(ours, models.step(unet, inputs))


def test_a_result_that_cannot_be_compared_is_the_hosts(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = taken_over(unet)
    plain, theirs = models.step(unet, inputs), spot._tensors
    monkeypatch.setattr(spot, "_tensors", lambda made: [t[..., :1] for t in theirs(made)])
    monkeypatch.setattr(spot, "norms", lambda *given: theirs(None))
    taken.generation_begins(0, steps=1)
    assert near(models.step(unet, inputs), plain)
    assert len(taken.spot.left) == KINDS + 1 and not taken.spot.compared
    assert "gave something else" in next(iter(taken.spot.left.values()))


def test_without_memory_for_the_hosts_it_is_ours(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = taken_over(unet)
    plain = models.step(unet, inputs)

    def fails(*given: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("out of memory")

    monkeypatch.setattr("lib_rocm_sd.unet.stand_in.BlockStandIn.theirs", fails)
    taken.generation_begins(0, steps=1)
    assert torch.equal(models.step(unet, inputs), plain) and not taken.spot.compared


@pytest.mark.parametrize("by", ["the hook", "the variable"])
def test_off_means_off(unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    class Quiet(Hook):
        compares = False

    if by == "the variable":
        monkeypatch.setenv(compared.VARIABLE, "0")
    taken = taken_over(unet, Quiet() if by == "the hook" else None)
    step_by(unet, inputs, 3)
    assert not taken.spot.compared


@pytest.mark.parametrize(
    ("norms", "says"),
    [
        ((0.0, 1.0, 1.0), ""),
        ((0.016, 1.0, 1.0), ""),
        ((0.03, 1.0, 1.0), "differed by 3.0% (rounding explains 1.7%)"),
        ((0.03, 1.0, 20.0), ""),
        ((math.inf, 1.0, 1.0), "gave other values"),
        ((math.nan, 1.0, 1.0), "gave other values"),
        ((math.nan, math.nan, math.nan), ""),
        ((1.0, 0.0, 0.0), "gave other values"),
    ],
)
def test_what_rounding_explains(norms: tuple[float, float, float], says: str) -> None:
    assert compared.difference(*norms, torch.finfo(torch.float16).eps) == says
