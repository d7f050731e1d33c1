"""Modules and calls of a UNet that are not for us."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.report import Report
from lib_rocm_sd.unet import compute
from lib_rocm_sd.unet.stand_in import BlockStandIn
from lib_rocm_sd.unet.takeover import take_over
from tests.unet import unet_models as models
from tests.unet.looking import blocks_of, near, own_forwards, rows

BF16 = torch.bfloat16


def test_circular_padding_is_the_hosts(unet: Any, inputs: Any) -> None:
    """The WebUI's tiling sets it on every convolution."""
    taken = take_over(unet)
    plain = models.step(unet, inputs)
    for module in unet.modules():
        if isinstance(module, nn.Conv2d):
            module.padding_mode = "circular"
            module._reversed_padding_repeated_twice = [int(module.padding[0])] * 4
    tiled = models.step(unet, inputs)
    assert not near(tiled, plain)
    row = rows(taken)["residual block"]
    assert row.ours == 0
    assert "padding_mode is circular" in next(iter(row.left))


@pytest.mark.parametrize("key", ["dilation", "padding", "stride", "up"])
def test_what_is_set_anew_on_a_layer_is_noticed(unet: Any, inputs: Any, key: str) -> None:
    """As ScaleCrafter dilates convolutions in the midst of a picture."""
    taken = take_over(unet)
    plain = models.step(unet, inputs)
    conv = unet.middle_block[0].in_layers[2]
    if key == "dilation":
        conv.dilation = conv.padding = (2, 2)
    elif key == "up":
        unet.middle_block[0].updown = True
    else:
        setattr(conv, key, (3, 3))
    row = rows(taken)["residual block"]
    assert row.ours == 7 and len(row.left) == 1
    if key == "dilation":
        made = models.step(unet, inputs)
        taken.give_back()
        assert near(made, models.step(unet, inputs)) and not near(made, plain)


def test_float32_is_left_alone(inputs: Any) -> None:
    unet = models.ldm_unet()
    taken = take_over(unet)
    assert {row.ours for row in taken.report()} == {0}
    assert {why for row in taken.report() for why in row.left} == {"its weights are float32"}
    assert set(own_forwards(unet)) == {None}


def test_one_block_of_another_dtype_is_left_alone(unet: Any) -> None:
    unet.middle_block[0].to(torch.float16)
    unet.middle_block[2].out_layers[3].float()
    unet.output_blocks[0][0].to(torch.float8_e4m3fn)
    row = rows(take_over(unet))["residual block"]
    assert row.ours == 6
    assert row.left == {
        "its weights are bfloat16, float32": 1,
        "its weights are float8_e4m3fn": 1,
    }


def test_a_call_of_another_dtype_is_the_hosts(unet: Any) -> None:
    take_over(unet)
    block = unet.middle_block[0]
    with pytest.raises(RuntimeError):  # the host's own
        block(models.draw(1, 64, 4, 4), models.draw(1, 128).to(BF16))


def test_gradients_and_training_are_the_hosts(unet: Any, inputs: Any) -> None:
    report = Report()
    taken = take_over(unet, Session(report=report))
    block, emb = unet.middle_block[0], models.draw(1, 128).to(BF16)
    x = models.draw(1, 64, 4, 4).to(BF16).requires_grad_()
    block(x, emb).float().sum().backward()
    assert x.grad is not None
    assert "gradients are wanted" in "\n".join(report.snapshot()["events"])
    taken.give_back()
    theirs = models.step(unet, inputs)
    taken.take_over()
    assert torch.equal(models.step(unet.train(), inputs), theirs)


def test_a_gradient_that_comes_from_within_is_the_hosts(unet: Any) -> None:
    """As of a hypernetwork, which attention keeps to itself: no module of the block has it."""
    report = Report()
    block = blocks_of(unet)[0]
    x, text = models.draw(2, 16, 32).to(BF16), models.draw(2, 7, models.KEYS_DIM).to(BF16)
    theirs, factor = block.attn2.forward, torch.ones((), dtype=BF16)
    block.attn2.forward = lambda x, *given, **more: theirs(x, *given, **more) * factor
    expected = block(x, text)
    take_over(unet, Session(report=report))
    assert not torch.equal(block(x, text), expected), "ours, which rounds less often"
    factor.requires_grad_()
    made = block(x, text)
    assert torch.equal(made, expected)
    made.float().sum().backward()
    assert factor.grad is not None
    told = "UNet, transformer block: a call was left to the host: gradients are wanted"
    assert told in report.snapshot()["events"]


def test_more_arguments_are_the_hosts(unet: Any) -> None:
    take_over(unet)
    block, x = blocks_of(unet)[0], models.draw(1, 5, 32).to(BF16)
    with pytest.raises(TypeError, match="surprise"):
        block(x, surprise=1)


def test_what_is_no_tensor_is_the_hosts(unet: Any) -> None:
    take_over(unet)
    x = models.draw(1, 64, 4, 4).to(BF16)
    with pytest.raises((TypeError, AttributeError)):
        unet.middle_block[0](x, "no embedding")
    with pytest.raises((TypeError, AttributeError)):
        unet.middle_block[1](None, None)


def test_an_error_of_ours_costs_no_picture(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = models.step(unet, inputs)
    report = Report()
    taken = take_over(unet, Session(report=report))

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(compute, "linear", broken)
    assert near(models.step(unet, inputs), theirs)
    assert "planted" in "\n".join(report.snapshot()["events"])
    assert rows(taken)["transformer"].ours == 0
    monkeypatch.undo()
    taken.take_over()
    assert rows(taken)["transformer"].ours == 4


def test_out_of_memory_is_passed_on(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_over(unet)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("planted")

    monkeypatch.setattr(compute, "conv", broken)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        models.step(unet, inputs)


def test_what_a_hosts_module_raises_is_the_hosts(unet: Any, inputs: Any) -> None:
    taken = take_over(unet)
    calls = []

    def failing(x: Any, context: Any = None) -> Any:
        calls.append(1)
        raise LookupError("theirs")

    blocks_of(unet)[0].attn2.forward = failing
    with pytest.raises(LookupError, match="theirs"):
        models.step(unet, inputs)
    assert calls == [1]
    assert rows(taken)["transformer block"].ours == 8


def test_a_copy_of_the_unet_is_the_hosts_own(unet: Any, inputs: Any) -> None:
    theirs = models.step(unet, inputs)
    take_over(unet)
    models.step(unet, inputs)
    copied = copy.deepcopy(unet)
    assert not any(isinstance(forward, BlockStandIn) for forward in own_forwards(copied))
    assert near(models.step(copied, inputs), theirs)
