"""What becomes ours of a UNet, and that nothing remains."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, load_model, save, save_model
from torch import nn

from lib_rocm_sd.engine import call_file
from lib_rocm_sd.engine.call_file import Capture, Wish
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.ops.linear.torch import as_one
from lib_rocm_sd.unet import stand_in, weights
from lib_rocm_sd.unet.takeover import take_over
from tests.unet import unet_models as models
from tests.unet.looking import blocks_of, near, own_forwards, rows

BF16 = torch.bfloat16


def test_every_kind_is_taken_over_and_given_back(unet: Any, inputs: Any) -> None:
    theirs = models.step(unet, inputs)
    taken = take_over(unet)
    assert {row.kind: (row.ours, row.total) for row in taken.report()} == {
        "residual block": (8, 8),
        "transformer": (4, 4),
        "transformer block": (8, 8),
        "upsampling": (1, 1),
        "downsampling": (1, 1),
        "first and last layers": (2, 2),
    }
    assert near(models.step(unet, inputs), theirs)
    taken.give_back()
    assert set(own_forwards(unet)) == {None}
    assert taken.report() == []
    assert torch.equal(models.step(unet, inputs), theirs)


def test_taking_over_again_changes_nothing(unet: Any, inputs: Any) -> None:
    taken = take_over(unet)
    before = own_forwards(unet)
    ours = models.step(unet, inputs)
    taken.take_over()
    assert own_forwards(unet) == before
    assert torch.equal(models.step(unet, inputs), ours)
    inner = take_over(unet)
    assert [row.ours for row in inner.report()] == [row.total for row in inner.report()]
    inner.give_back()
    assert own_forwards(unet) == before


@pytest.mark.parametrize("meanwhile", ["nothing", "taken over again", "given back"])
def test_a_forward_of_ours_that_a_host_kept_and_put_back_serves_again(
    unet: Any, inputs: Any, meanwhile: str
) -> None:
    """As extensions do that replace a block's forward for one picture."""
    taken = take_over(unet)
    ours, block = models.step(unet, inputs), unet.middle_block[0]
    kept = block.forward
    block.forward = lambda *given: type(block).forward(block, *given) * 2
    doubled = models.step(unet, inputs)
    (why,) = rows(taken)["residual block"].left
    assert "has been replaced" in why and not near(doubled, ours)
    if meanwhile == "taken over again":
        taken.take_over(anew=False)
    elif meanwhile == "given back":
        taken.give_back()
    block.forward = kept
    if meanwhile == "given back":
        assert near(models.step(unet, inputs), ours)
        other = take_over(unet)
        assert rows(other)["residual block"].ours == 8
        taken = other
    else:
        taken.take_over(anew=False)
    assert torch.equal(models.step(unet, inputs), ours)
    assert all(row.ours == row.total for row in taken.report())
    taken.give_back()
    assert set(own_forwards(unet)) == {None}


def test_weights_are_laid_anew_in_place_and_given_back_as_they_were(unet: Any, inputs: Any) -> None:
    before = copy.deepcopy(unet.state_dict())
    strides = {name: tensor.stride() for name, tensor in unet.named_parameters()}
    taken = take_over(unet)
    models.step(unet, inputs)
    laid = [n for n, tensor in unet.named_parameters() if tensor.stride() != strides[n]]
    assert len(laid) == 20
    assert all(
        unet.get_parameter(name).is_contiguous(memory_format=torch.channels_last) for name in laid
    )
    state = unet.state_dict()
    assert all(tensor.is_contiguous() for tensor in state.values())
    saved = load(save(state))
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())
    taken.give_back()
    after = dict(unet.named_parameters())
    assert {name: tensor.stride() for name, tensor in after.items()} == strides
    assert all(torch.equal(after[name], before[name]) for name in strides)
    assert not any(module._state_dict_pre_hooks for module in unet.modules())


def test_layers_of_the_same_rows_lie_together_until_they_are_given_back(
    unet: Any, inputs: Any, tmp_path: Path
) -> None:
    before = copy.deepcopy(unet.state_dict())
    attention = [block.attn1 for block in blocks_of(unet)]
    taken = take_over(unet)
    ours = models.step(unet, inputs)
    assert all(as_one(joint(one)) is not None for one in attention)
    state = unet.state_dict()
    places = [tensor.untyped_storage().data_ptr() for tensor in state.values()]
    assert len(set(places)) == len(places)  # writers leave out what is in another's memory
    save_model(unet, str(tmp_path / "unet.safetensors"))
    saved = load_file(tmp_path / "unet.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())
    assert not load_model(unet, str(tmp_path / "unet.safetensors"))[0]
    del state  # while it is kept, weights stay as they are
    assert torch.equal(models.step(unet, inputs), ours)
    taken.give_back()
    for weight in (weight for one in attention for weight in joint(one)):
        assert weight.untyped_storage().nbytes() == weight.nbytes and weight.is_contiguous()
    assert all(torch.equal(before[name], t) for name, t in unet.state_dict().items())


def test_layers_that_a_host_parted_are_joined_again(unet: Any, inputs: Any) -> None:
    taken, first = take_over(unet), blocks_of(unet)[0].attn1
    ours = models.step(unet, inputs)
    first.to_k.weight.data = first.to_k.weight.data.clone()  # as a move does
    assert as_one(joint(first)) is None
    assert torch.equal(models.step(unet, inputs), ours) and as_one(joint(first)) is not None
    first.to_v.weight = nn.Parameter(first.to_v.weight.clone(), requires_grad=False)
    assert torch.equal(models.step(unet, inputs), ours) and as_one(joint(first)) is not None
    with torch.no_grad():
        first.to_v.weight.mul_(0.5)
    changed = models.step(unet, inputs)
    assert not torch.equal(changed, ours)
    taken.give_back()
    assert near(models.step(unet, inputs), changed) and as_one(joint(first)) is None


@pytest.mark.parametrize("why", ["a bias", "their own memory", "one parameter", "a slice", "rows"])
def test_layers_that_are_not_alone_or_not_alike_stay_apart(
    unet: Any, inputs: Any, why: str
) -> None:
    first = blocks_of(unet)[0].attn1
    weight = first.to_v.weight
    if why == "a bias":
        first.to_v.bias = nn.Parameter(torch.zeros(len(weight), dtype=BF16), requires_grad=False)
    elif why == "their own memory":
        wide = torch.cat([weight.data, weight.data])
        weight.data = wide[: len(weight)]
    elif why == "one parameter":
        first.to_v.weight = first.to_k.weight
    elif why == "a slice":
        weight.data = torch.cat([weight.data, weight.data], 1)[:, : weight.shape[1]]
    else:
        weight.data = weight.data.t().contiguous().t()
    places = [each.data_ptr() for each in joint(first)]
    theirs = models.step(unet, inputs)
    taken = take_over(unet)
    assert near(models.step(unet, inputs), theirs)
    assert [each.data_ptr() for each in joint(first)] == places
    assert as_one(joint(blocks_of(unet)[1].attn1)) is not None
    taken.give_back()
    assert torch.equal(models.step(unet, inputs), theirs)


def test_layers_that_a_host_has_in_memory_of_its_own_stay_there(unet: Any, inputs: Any) -> None:
    """Also those that were joined before."""
    taken, first = take_over(unet), blocks_of(unet)[0].attn1
    ours = models.step(unet, inputs)
    rows = len(first.to_q.weight)
    own = torch.cat([each.data for each in reversed(joint(first))])
    for layer, part in zip((first.to_v, first.to_k, first.to_q), own.split(rows), strict=True):
        layer.weight.data = part
    places = [each.data_ptr() for each in joint(first)]
    assert torch.equal(models.step(unet, inputs), ours)
    assert [each.data_ptr() for each in joint(first)] == places
    taken.give_back()
    assert [each.data_ptr() for each in joint(first)] == places


def test_nothing_is_laid_anew_amid_anothers_graph(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replay would do it again, from memory that is somebody else's by then."""
    theirs = models.step(unet, inputs)
    taken = take_over(unet)
    with monkeypatch.context() as patch:
        patch.setattr(weights, "is_recording", lambda device: True)
        assert near(models.step(unet, inputs), theirs)
        assert as_one(joint(blocks_of(unet)[0].attn1)) is None
        assert all(parameter.is_contiguous() for parameter in unet.parameters())
    taken.take_over()
    models.step(unet, inputs)
    assert as_one(joint(blocks_of(unet)[0].attn1)) is not None
    taken.give_back()


def test_a_layer_that_was_replaced_is_not_kept(unet: Any, inputs: Any) -> None:
    taken, first = take_over(unet), blocks_of(unet)[0].attn1
    models.step(unet, inputs)
    layer = weakref.ref(first.to_q)
    first.to_q = copy.deepcopy(first.to_q)
    models.step(unet, inputs)
    taken.take_over()
    gc.collect()
    assert layer() is None
    taken.give_back()


def joint(attention: Any) -> list[torch.Tensor]:
    """The weights that are to lie one after another."""
    return [attention.to_q.weight, attention.to_k.weight, attention.to_v.weight]


def test_little_memory_is_kept_beside_the_weights(unet: Any, inputs: Any) -> None:
    taken = take_over(unet)
    models.step(unet, inputs)
    own = sum(p.numel() * p.element_size() for p in unet.parameters())
    assert 0 < taken.extra_bytes < own // 20


def test_a_loaded_state_is_seen(unet: Any, inputs: Any) -> None:
    other = models.fill(models.ldm_unet(depth=2), seed=5).to(BF16)
    theirs = models.step(other, inputs)
    taken = take_over(unet)
    models.step(unet, inputs)
    unet.load_state_dict(other.state_dict())
    changed = models.step(unet, inputs)
    taken.give_back()
    assert near(changed, theirs)
    fresh = take_over(other)
    assert torch.equal(models.step(other, inputs), changed)
    fresh.give_back()


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_a_change_in_place_is_seen(unet: Any, inputs: Any, kind: str) -> None:
    taken = take_over(unet)
    before = models.step(unet, inputs)
    resnet = unet.input_blocks[3][0]
    parameters = [getattr(m, kind) for m in (resnet.in_layers[2], resnet.skip_connection)]
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.5)
    ours = models.step(unet, inputs)
    assert not near(ours, before)
    taken.give_back()
    assert near(ours, models.step(unet, inputs))


def test_a_bias_that_comes_and_goes_is_seen(unet: Any, inputs: Any) -> None:
    """As the WebUI's networks make one where a layer has none."""
    take_over(unet)
    before = models.step(unet, inputs)
    layer = blocks_of(unet)[0].attn1.to_q
    layer.bias = nn.Parameter(models.draw(layer.out_features).to(BF16), requires_grad=False)
    assert not torch.equal(models.step(unet, inputs), before)
    layer.bias = None
    assert torch.equal(models.step(unet, inputs), before)


def test_taking_over_again_reads_only_what_has_changed(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = take_over(unet)
    expected = models.step(unet, inputs)
    read, seen = stand_in.BlockStandIn._read, []

    def counted(block: stand_in.BlockStandIn) -> Any:
        seen.append(block.module)
        return read(block)

    monkeypatch.setattr(stand_in.BlockStandIn, "_read", counted)
    taken.take_over(anew=False)
    assert not seen
    left, barred = unet.middle_block[0], unet.middle_block[2]
    left.forward = lambda x, emb: x
    vars(barred)["forward"].failed(ValueError("planted"))
    assert rows(taken)["residual block"].ours == 6
    taken.take_over(anew=False)
    assert set(seen) == {left, barred}
    assert rows(taken)["residual block"].ours == 7
    del left.forward
    taken.take_over(anew=False)
    assert torch.equal(models.step(unet, inputs), expected)
    taken.take_over()
    assert len(seen) > 20


def test_calls_of_one_block_are_captured(
    unet: Any, inputs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = take_over(unet)
    names = [name for name, module in unet.named_modules() if module in blocks_of(unet)]
    wanted = names[0].rpartition(".transformer_blocks")[0]
    file = tmp_path / "calls.safetensors"
    monkeypatch.setattr(engine, "capture", Capture(Wish(str(file), block=wanted, calls=999)))
    models.step(unet, inputs)
    taken.give_back()
    calls = list(call_file.read(file))
    assert {call.how["block"] for call in calls} == {wanted}
    assert {"attention", "linear"} <= {call.op for call in calls}
