"""Tensors that share a UNet's weights with the host: they stay the weights while ours is on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lib_rocm_sd.engine import memory
from lib_rocm_sd.unet import stand_in, takeover, weights
from tests.unet import unet_models as models
from tests.unet.looking import BF16, near, rows


@pytest.fixture
def taken(unet: Any, inputs: Any) -> Iterator[takeover.UnetTakeover]:
    made = takeover.take_over(unet)
    models.step(unet, inputs)
    yield made
    made.give_back()


def laid(unet: Any) -> int:
    """How many convolutions are laid for us."""
    convs = (p for p in unet.parameters() if p.ndim == 4 and p.shape[-1] > 1)
    return sum(not weight.is_contiguous() for weight in convs)


def copied(unet: Any) -> Any:
    """The same values in a UNet of the host's own."""
    other = models.ldm_unet(depth=2).to(BF16)
    other.load_state_dict({name: t.clone() for name, t in unet.named_parameters()})
    return other


def halve(tensors: Any) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(0.5)


def test_a_state_dict_that_is_read_costs_no_memory(
    unet: Any, inputs: Any, taken: takeover.UnetTakeover
) -> None:
    before = laid(unet)
    ours = models.step(unet, inputs)
    state = unet.state_dict()
    assert {name: t.data_ptr() for name, t in unet.named_parameters()} == {
        name: t.data_ptr() for name, t in state.items()
    }
    assert all(t.is_contiguous() and not memory.is_shared(t) for t in state.values())
    del state
    assert torch.equal(models.step(unet, inputs), ours)
    assert 0 < before == laid(unet)


@pytest.mark.parametrize("when", ["before", "while on", "while on, kept"])
def test_values_written_through_a_state_dict_are_the_weights(
    unet: Any, inputs: Any, when: str
) -> None:
    state = unet.state_dict() if when == "before" else None
    taken = takeover.take_over(unet)
    models.step(unet, inputs)
    state = unet.state_dict() if state is None else state
    if when == "while on, kept":
        models.step(unet, inputs)
    halve(state.values())
    expected = models.step(copied(unet), inputs)
    assert near(models.step(unet, inputs), expected)
    if when != "while on":
        assert rows(taken)["downsampling"].left == {weights.HELD: 1}
    del state
    assert near(models.step(unet, inputs), expected)
    assert rows(taken)["downsampling"].ours == 1
    taken.give_back()
    assert torch.equal(models.step(unet, inputs), expected)


def test_values_written_through_data_are_used_in_the_next_step(
    unet: Any, inputs: Any, taken: takeover.UnetTakeover
) -> None:
    """As EMAModel.copy_to writes: nothing counts it."""
    halve(parameter.data for parameter in unet.parameters())
    assert near(models.step(unet, inputs), models.step(copied(unet), inputs))
    assert all(row.ours == row.total for row in taken.report())


def test_a_view_that_is_held_stays_the_weight(
    unet: Any, inputs: Any, taken: takeover.UnetTakeover
) -> None:
    """Also when a state_dict is asked for meanwhile."""
    conv = unet.middle_block[0].in_layers[2]
    view = conv.weight.data
    state = unet.state_dict()
    assert state["middle_block.0.in_layers.2.weight"].data_ptr() == view.data_ptr()
    view.zero_()
    assert not conv.weight.any()
    del state
    assert near(models.step(unet, inputs), models.step(copied(unet), inputs))


def test_a_part_of_joined_weights_that_is_held_stays_the_weight(
    unet: Any, inputs: Any, taken: takeover.UnetTakeover
) -> None:
    block = next(m for m in unet.modules() if type(m).__name__ == "BasicTransformerBlock")
    view = block.attn1.to_k.weight.data
    unet.state_dict()
    view.zero_()
    assert not block.attn1.to_k.weight.any()
    assert near(models.step(unet, inputs), models.step(copied(unet), inputs))


def test_a_state_dict_without_memory_to_move_weights_is_had_all_the_same(
    unet: Any, inputs: Any, taken: takeover.UnetTakeover, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {name: t.clone() for name, t in unet.named_parameters()}

    def fails(*given: Any) -> None:
        raise torch.cuda.OutOfMemoryError("out of memory")

    monkeypatch.setattr(weights, "restride", fails)
    state = unet.state_dict()
    assert all(torch.equal(state[name], t) for name, t in expected.items())
    monkeypatch.undo()
    del state
    models.step(unet, inputs)
    assert all(row.ours == row.total for row in taken.report())


def test_weights_are_laid_before_anybody_asks_where_they_lie(
    unet: Any, inputs: Any, taken: takeover.UnetTakeover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one lies as the host has it, another may have been when a graph was recorded."""
    seen: list[bool] = []
    last = torch.channels_last

    def asked(slots: weights.Slots) -> Any:
        every = [p for p in map(dict.get, *slots) if p is not None and p.ndim == 4]
        convs = [p for p in every if p.shape[2:] != (1, 1)]
        seen.append(all(p.is_contiguous(memory_format=last) for p in convs))
        return weights.laid(slots)

    monkeypatch.setattr(stand_in, "laid", asked)
    unet.state_dict()
    assert (
        not unet.middle_block[0]
        .in_layers[2]
        .weight.is_contiguous(memory_format=torch.channels_last)
    )
    models.step(unet, inputs)
    assert len(seen) > 10 and all(seen)


def test_a_weight_that_was_turned_is_looked_up_anew() -> None:
    """It may lie where another lay that was not."""
    layer = torch.nn.Linear(4, 6)
    slots = weights.slots_of([layer])
    before = weights.laid(slots)
    place = layer.weight.data_ptr()
    layer.weight.data = layer.weight.data.as_strided((6, 4), (1, 6))
    assert layer.weight.data_ptr() == place and weights.laid(slots) != before
