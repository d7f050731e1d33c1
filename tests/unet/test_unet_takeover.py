"""What becomes ours of a UNet, what is left alone and why, and that nothing remains."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.report import Report
from lib_rocm_sd.unet import compute
from lib_rocm_sd.unet.hook import Hook
from lib_rocm_sd.unet.stand_in import BlockStandIn
from lib_rocm_sd.unet.takeover import KindReport, UnetTakeover, take_over
from tests.unet import unet_models as models

BF16 = torch.bfloat16


@pytest.fixture
def unet() -> Any:
    """ldm's, in bfloat16."""
    return models.ldm_unet(depth=2).to(BF16)


@pytest.fixture
def inputs() -> dict[str, Any]:
    given: dict[str, Any] = models.in_dtype(models.ldm_inputs(), BF16)
    return given


def rows(taken: UnetTakeover) -> dict[str, KindReport]:
    return {row.kind: row for row in taken.report()}


def near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return models.errors(ours, theirs)[0] < 0.05


def blocks_of(unet: nn.Module) -> list[Any]:
    name = "BasicTransformerBlock"
    return [module for module in unet.modules() if type(module).__name__ == name]


def own_forwards(unet: nn.Module) -> list[Any]:
    return [vars(module).get("forward") for module in unet.modules()]


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
    assert not any(module._state_dict_hooks for module in unet.modules())


def test_little_memory_is_kept_beside_the_weights(unet: Any, inputs: Any) -> None:
    taken = take_over(unet)
    models.step(unet, inputs)
    own = sum(p.numel() * p.element_size() for p in unet.parameters())
    assert 0 < taken.extra_bytes < own // 20


def test_a_loaded_state_is_seen(unet: Any, inputs: Any) -> None:
    other = models.fill(models.ldm().UNetModel(depth=2), seed=5).to(BF16)
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


# --- what others do to a UNet


def test_a_replaced_attention_is_called_between_our_norms(unet: Any, inputs: Any) -> None:
    """As IP-Adapter and regional prompters replace attn2.forward."""
    taken = take_over(unet)
    plain = models.step(unet, inputs)
    attn2 = blocks_of(unet)[0].attn2
    own, seen = attn2.forward, []

    def adapted(x: Any, context: Any = None, mask: Any = None) -> Any:
        seen.append((x.shape, context.shape))
        return 2 * own(x, context=context)

    attn2.forward = adapted
    theirs_on = models.step(unet, inputs)
    row = rows(taken)["transformer block"]
    assert (row.ours, row.total) == (8, 8)
    assert row.partly == {"attn2.forward has been replaced": 1}
    assert seen == [(torch.Size([2, 64, 32]), torch.Size([2, 77, models.KEYS_DIM]))]
    taken.give_back()
    assert near(theirs_on, models.step(unet, inputs))
    taken = take_over(unet)
    del attn2.forward
    assert near(models.step(unet, inputs), plain)
    assert not rows(taken)["transformer block"].partly


def test_hypertile_like_forwards_come_and_go(unet: Any, inputs: Any) -> None:
    taken = take_over(unet)
    plain = models.step(unet, inputs)
    attentions = [block.attn1 for block in blocks_of(unet)]
    for attn in attentions:
        attn.forward = partial(type(attn).forward, attn)
    wrapped = models.step(unet, inputs)
    assert rows(taken)["transformer block"].partly == {"attn1.forward has been replaced": 8}
    assert near(wrapped, plain)
    assert not torch.equal(wrapped, plain)
    for attn in attentions:
        del attn.forward
    assert torch.equal(models.step(unet, inputs), plain)


def test_a_swapped_class_is_called_as_it_is(unet: Any, inputs: Any) -> None:
    """As ToMe does with transformer blocks."""
    taken = take_over(unet)
    block = blocks_of(unet)[1]
    calls = []

    class Merging(type(block)):  # type: ignore[misc]
        def _forward(self, x: Any, context: Any = None) -> Any:
            calls.append(x.shape)
            return super()._forward(x, context)

    before = type(block)
    block.__class__ = Merging
    changed = models.step(unet, inputs)
    assert len(calls) == 1
    row = rows(taken)["transformer block"]
    assert row.ours == 7
    assert "Merging" in next(iter(row.left))
    taken.give_back()
    assert near(changed, models.step(unet, inputs))
    block.__class__ = before


def test_an_inner_forward_on_the_instance_is_respected(unet: Any, inputs: Any) -> None:
    """As ControlNet's reference mode sets `_forward` of transformer blocks."""
    taken = take_over(unet)
    block = blocks_of(unet)[0]
    block._forward = lambda x, context=None: torch.zeros_like(x)
    models.step(unet, inputs)
    assert rows(taken)["transformer block"].left == {"block._forward has been replaced": 1}
    del block._forward
    models.step(unet, inputs)
    assert rows(taken)["transformer block"].ours == 8


def test_a_replaced_feed_forward_is_called(unet: Any, inputs: Any) -> None:
    taken = take_over(unet)
    ff = blocks_of(unet)[0].ff
    ff.net[0] = nn.Sequential(nn.Linear(32, 128), nn.GELU()).to(BF16).requires_grad_(False)
    ours = models.step(unet, inputs)
    assert list(rows(taken)["transformer block"].partly) == [
        "ff.net.0 is a Sequential of torch.nn.modules.container"
    ]
    taken.give_back()
    assert near(ours, models.step(unet, inputs))


@pytest.fixture
def hijacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The WebUI has put forwards of its own into the classes."""
    for name, source in (
        ("SpatialTransformer", "modules.sd_hijack_utils"),
        ("CrossAttention", "modules.sd_hijack_optimizations"),
    ):
        cls = getattr(models.ldm(), name)
        own = cls.forward

        def replaced(self: Any, *args: Any, own: Any = own, **kwargs: Any) -> Any:
            return own(self, *args, **kwargs)

        replaced.__module__ = source
        monkeypatch.setattr(cls, "forward", replaced)


@pytest.mark.usefixtures("hijacked")
def test_forwards_in_the_classes_are_known_by_where_they_come_from(unet: Any) -> None:
    taken = take_over(unet)
    why = "SpatialTransformer.forward has been replaced by modules.sd_hijack_utils"
    assert rows(taken)["transformer"].left == {f"transformer: {why}": 4}
    taken.give_back()
    hook = Hook()
    hook.hosts_own = ("modules.sd_hijack_utils",)
    taken = take_over(unet, hook=hook)
    assert rows(taken)["transformer"].ours == 4
    row = rows(taken)["transformer block"]
    assert row.ours == 8
    assert sum(row.partly.values()) == 16
    assert all("modules.sd_hijack_optimizations" in why for why in row.partly)


def test_another_optimizer_chosen_later_is_seen(
    unet: Any, inputs: Any, request: pytest.FixtureRequest
) -> None:
    taken = take_over(unet)
    models.step(unet, inputs)
    assert not rows(taken)["transformer block"].partly
    request.getfixturevalue("hijacked")
    models.step(unet, inputs)
    assert sum(rows(taken)["transformer block"].partly.values()) == 16
    assert rows(taken)["transformer"].ours == 0


def test_weights_of_inference_mode_are_left_alone(inputs: Any) -> None:
    with torch.inference_mode():
        unet = models.ldm_unet().to(BF16)
        row = rows(take_over(unet))["residual block"]
    assert row.left == {"its weights were made in inference mode": 8}


def test_weights_within_a_larger_memory_are_left_alone(unet: Any) -> None:
    conv = unet.middle_block[0].in_layers[2]
    joint = torch.zeros(2, *conv.weight.shape, dtype=BF16)
    conv.weight.data = joint[1].copy_(conv.weight)
    row = rows(take_over(unet))["residual block"]
    assert row.left == {"its weights share their memory with others": 1}


def test_writing_into_a_blocks_output_harms_nobody(unet: Any, inputs: Any) -> None:
    """As FreeU does, in place; and ControlNet's residuals are added outside."""
    control = models.draw(2, 64, 4, 4).to(BF16)

    def weaken(module: Any, given: Any, made: torch.Tensor) -> None:
        made[:, : made.shape[1] // 2] *= 0.5

    handles = [block.register_forward_hook(weaken) for block in unet.output_blocks]
    theirs = models.step(unet, {**inputs, "control": control})
    taken = take_over(unet)
    first = models.step(unet, {**inputs, "control": control})
    assert near(first, theirs)
    assert torch.equal(models.step(unet, {**inputs, "control": control}), first)
    for handle in handles:
        handle.remove()
    taken.give_back()


@pytest.mark.parametrize("index", [0, 1])
def test_a_forward_under_ours_is_left_alone(unet: Any, inputs: Any, index: int) -> None:
    module = unet.output_blocks[1][index]
    theirs = type(module).forward
    module.forward = lambda *args: theirs(module, *args)
    kept = module.forward
    taken = take_over(unet)
    models.step(unet, inputs)
    assert sum(sum(row.left.values()) for row in taken.report()) == 1
    assert module.forward is kept
    taken.give_back()
    assert module.forward is kept


def test_a_forward_over_ours_stays_and_gets_the_hosts_own(unet: Any, inputs: Any) -> None:
    theirs = models.step(unet, inputs)
    taken = take_over(unet)
    module = unet.middle_block[0]
    ours, calls = module.forward, []

    def over(*args: Any) -> Any:
        calls.append(len(args))
        return ours(*args)

    module.forward = over
    models.step(unet, inputs)
    assert calls == [2]
    row = rows(taken)["residual block"]
    assert row.ours == 7
    assert "over of test_unet_takeover.py" in next(iter(row.left))
    taken.give_back()
    assert module.forward is over
    assert torch.equal(models.step(unet, inputs), theirs)


# --- modules and calls that are not for us


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


# --- what a host says


class Networks(Hook):
    """A host whose layers are to be made ready, as the WebUI's for its networks."""

    def __init__(self) -> None:
        self.refuses = ""
        self.attends = ""
        self.wanted = 0.0
        self.applied: dict[nn.Module, float] = {}

    def ready(self, leaves: Sequence[nn.Module]) -> str:
        for leaf in leaves:
            change = self.wanted - self.applied.get(leaf, 0.0)
            if change:
                leaf.get_parameter("weight").data.add_(change)
                self.applied[leaf] = self.wanted
        return self.refuses

    def attention(self, module: nn.Module) -> str:
        return self.attends


def test_leaves_are_made_ready_before_a_block_runs(unet: Any, inputs: Any) -> None:
    hook = Networks()
    take_over(unet, hook=hook)
    before = models.step(unet, inputs)
    hook.wanted = 2.0**-6
    changed = models.step(unet, inputs)
    named = {name for name, module in unet.named_modules() if module in hook.applied}
    weights = {name.rpartition(".")[0] for name, _ in unet.named_parameters()}
    assert weights - named == {"time_embed.0", "time_embed.2"}
    assert not torch.equal(changed, before)


def test_time_embeddings_are_made_together(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, linear = [], compute.linear

    def counted(x: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        counts.append(len(weight) if isinstance(weight, list) else 1)
        return linear(x, weight, *args, **kwargs)

    monkeypatch.setattr(compute, "linear", counted)
    taken = take_over(unet)
    joint = models.step(unet, inputs)
    assert counts[:3] == [3, 3, 2]
    assert len(counts) == 3 + 8 * 7 + 4 * 2
    taken._embeddings.layers = ()
    assert torch.equal(models.step(unet, inputs), joint)


def test_an_embedding_layer_that_changes_amid_a_step_is_read_again(unet: Any, inputs: Any) -> None:
    taken = take_over(unet)
    before = models.step(unet, inputs)
    layer = unet.output_blocks[3][0].emb_layers[1]

    def change(*_: Any) -> None:
        with torch.no_grad():
            layer.weight.add_(0.5)

    handle = unet.middle_block.register_forward_hook(change)
    changed = models.step(unet, inputs)
    handle.remove()
    again = models.step(unet, inputs)
    assert not torch.equal(changed, before)
    assert torch.equal(changed, again)
    taken.give_back()


def test_a_host_may_keep_its_blocks(unet: Any, inputs: Any) -> None:
    theirs, hook, report = models.step(unet, inputs), Networks(), Report()
    take_over(unet, Session(report=report), hook)
    hook.refuses = "networks are applied in the forwards"
    assert torch.equal(models.step(unet, inputs), theirs)
    assert "networks are applied in the forwards" in "\n".join(report.snapshot()["events"])


def test_a_host_may_keep_its_attention(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook, calls, attention = Networks(), [], compute.attention

    def counted(*args: Any) -> Any:
        calls.append(1)
        return attention(*args)

    monkeypatch.setattr(compute, "attention", counted)
    take_over(unet, hook=hook)
    models.step(unet, inputs)
    assert len(calls) == 16
    hook.attends = "a hypernetwork is loaded"
    models.step(unet, inputs)
    assert len(calls) == 16
