"""The calls of blocks are looked at once, and again when what they are made of has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.report import Report
from lib_rocm_sd.unet import stand_in, weights
from lib_rocm_sd.unet.takeover import take_over
from tests.unet import unet_models as models
from tests.unet.looking import near, rows


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The op of each call whose inputs the engine looks at."""
    seen: list[str] = []
    key = engine._key

    def noted(op: Any, *args: Any) -> Any:
        seen.append(op.name)
        return key(op, *args)

    monkeypatch.setattr(engine, "_key", noted)
    return seen


def test_a_step_like_the_last_looks_at_nothing(
    unet: Any, inputs: dict[str, Any], looked: list[str]
) -> None:
    """The first lays convolutions' weights anew."""
    take_over(unet)
    first = models.step(unet, inputs)
    models.step(unet, inputs)
    assert {"attention", "linear", "layer norm"} <= set(looked)
    looked.clear()
    assert torch.equal(models.step(unet, inputs), first)
    assert looked == []


def test_another_size_is_looked_at_and_the_first_is_kept(
    unet: Any, inputs: dict[str, Any], looked: list[str]
) -> None:
    take_over(unet)
    models.step(unet, inputs)
    first = models.step(unet, inputs)
    other = {**inputs, "x": inputs["x"][..., :4].contiguous()}
    looked.clear()
    models.step(unet, other)
    assert looked
    looked.clear()
    assert torch.equal(models.step(unet, inputs), first)
    assert looked == []


def test_a_weight_that_lies_otherwise_is_looked_at(
    unet: Any, inputs: dict[str, Any], looked: list[str]
) -> None:
    take_over(unet)
    models.step(unet, inputs)
    first = models.step(unet, inputs)
    layer = unet.middle_block[1].transformer_blocks[0].attn1.to_out[0]
    layer.weight = nn.Parameter(layer.weight.t().contiguous().t(), requires_grad=False)
    looked.clear()
    assert torch.equal(models.step(unet, inputs), first)
    assert set(looked) == {"attention", "linear", "layer norm", "layer norm biased"}
    with torch.no_grad():
        layer.weight.data = 2 * layer.weight.data
    assert not torch.equal(models.step(unet, inputs), first)


def test_a_weight_of_another_dtype_in_the_same_memory_is_looked_at(
    unet: Any, inputs: dict[str, Any], looked: list[str]
) -> None:
    """Memory that was given back may become that of another weight."""
    take_over(unet)
    models.step(unet, inputs)
    models.step(unet, inputs)
    norm = unet.middle_block[1].transformer_blocks[0].norm2
    norm.weight.data = norm.weight.data.view(torch.float16)
    looked.clear()
    models.step(unet, inputs)
    assert set(looked) == {"attention", "linear", "layer norm", "layer norm biased"}


def test_blocks_are_the_hosts_while_a_convolution_of_ours_is_missing(
    unet: Any, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card: what torch does in its stead is slower than the host's own block."""
    theirs, report = models.step(unet, inputs), Report()
    taken = take_over(unet, Session(report=report))
    arch = type("Info", (), {"arch": object()})()
    monkeypatch.setattr(stand_in, "identify", lambda device: arch)
    with_torchs = models.step(unet, inputs)
    left = models.step(unet, inputs)
    assert near(left, theirs) and not torch.equal(left, with_torchs)
    said = [event for event in report.snapshot()["events"] if "was left to the host" in event]
    assert any("residual block" in each and "no convolution of ours" in each for each in said)
    (why,) = rows(taken)["residual block"].left
    assert rows(taken)["residual block"].ours == 0 and "no convolution of ours" in why
    monkeypatch.undo()
    engine.renew()
    assert torch.equal(models.step(unet, inputs), with_torchs)
    assert rows(taken)["residual block"].ours == 8
    taken.give_back()


def test_a_bias_that_is_written_to_while_it_is_read_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by another thread, which merges a LoRA."""
    conv: Any = nn.Conv2d(16, 16, 3, padding=1).half().requires_grad_(False)
    kept, copied = weights.UnetWeights(), weights._copy

    def written_to(into: Any, given: Any) -> None:
        copied(into, given)
        conv.bias.add_(1)

    monkeypatch.setattr(weights, "_copy", written_to)
    kept.of(conv)
    monkeypatch.setattr(weights, "_copy", copied)
    other: Any = nn.Conv2d(16, 16, 3, padding=1).half().requires_grad_(False)
    kept.of(other)
    second: Any = kept._made[conv, False]
    assert not torch.equal(second.bias.half(), conv.bias)
    assert kept.of(conv) is second
    assert torch.equal(second.bias.half(), conv.bias)
