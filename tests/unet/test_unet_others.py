"""What others do to a UNet: it is called as it is, or left alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.unet.hook import Hook
from lib_rocm_sd.unet.takeover import take_over
from lib_rocm_sd.unet.weights import restride
from tests.doubles import module_of
from tests.unet import unet_models as models
from tests.unet.looking import blocks_of, near, rows

BF16 = torch.bfloat16


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
    assert row.partly == {"attn2.forward has been replaced (adapted of test_unet_others.py)": 1}
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
    attentions, seen = [block.attn1 for block in blocks_of(unet)], []

    def tiled(attn: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(attn)
        return type(attn).forward(attn, x, *args, **kwargs)

    for attn in attentions:
        attn.forward = partial(tiled, attn)
    wrapped = models.step(unet, inputs)
    assert seen == attentions
    why = "attn1.forward has been replaced (tiled of test_unet_others.py)"
    assert rows(taken)["transformer block"].partly == {why: 8}
    assert near(wrapped, plain)
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
    why = "block._forward has been replaced (<lambda> of test_unet_others.py)"
    assert rows(taken)["transformer block"].left == {why: 1}
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


@pytest.mark.parametrize("path", ["norm1", "ff.net.0"])
def test_weights_that_become_float32_in_place_are_told(
    unet: Any, inputs: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the WebUI's GroupNorm32 and GEGLU with --upcast-sampling, at each call of them."""
    geglu = module_of("ldm.modules.attention").GEGLU
    own = geglu.forward

    def upcast(self: Any, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = own(self.float(), x.float())
        return made.to(BF16)

    upcast.__module__ = "modules.sd_hijack_utils"
    monkeypatch.setattr(geglu, "forward", upcast)
    hook = Hook()
    hook.hosts_own = ("modules.sd_hijack_utils",)
    taken = take_over(unet, hook=hook)
    plain = models.step(unet, inputs)
    unet.middle_block[0].in_layers[0].float()
    blocks_of(unet)[0].get_submodule(path).float()
    assert near(models.step(unet, inputs), plain)
    for kind in ("residual block", "transformer block"):
        row = rows(taken)[kind]
        assert (row.ours, row.total) == (7, 8)
        assert row.left == {"its weights are bfloat16, float32": 1}
    unet.to(BF16)
    taken.take_over()
    assert torch.equal(models.step(unet, inputs), plain)
    assert all(row.ours == row.total for row in taken.report())


@pytest.fixture
def hijacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The WebUI has put forwards of its own into the classes."""
    for name, source in (
        ("SpatialTransformer", "modules.sd_hijack_utils"),
        ("CrossAttention", "modules.sd_hijack_optimizations"),
    ):
        cls = getattr(module_of("ldm.modules.attention"), name)
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


def test_weights_that_count_no_changes_any_more_are_left_alone() -> None:
    """As Forge leaves them, which moves by `.data` what it has loaded in inference mode."""
    with torch.inference_mode():
        unet = models.ldm_unet().to(BF16)
    for parameter in unet.parameters():
        parameter.data = torch.zeros(parameter.shape, dtype=BF16)
    assert not any(parameter.is_inference() for parameter in unet.parameters())
    taken = take_over(unet)
    assert rows(taken)["residual block"].left == {"its weights were made in inference mode": 8}


def test_weights_within_a_larger_memory_are_left_alone(unet: Any) -> None:
    conv = unet.middle_block[0].in_layers[2]
    joint = torch.zeros(2, *conv.weight.shape, dtype=BF16)
    conv.weight.data = joint[1].copy_(conv.weight)
    row = rows(take_over(unet))["residual block"]
    assert row.left == {"its weights share their memory with others": 1}


def test_weights_of_another_class_are_left_alone(unet: Any, inputs: Any) -> None:
    """As packed ones that say bfloat16 of themselves."""

    class Packed(nn.Parameter):
        pass

    conv = unet.middle_block[0].in_layers[2]
    conv.weight = Packed(conv.weight.detach())
    taken = take_over(unet)
    (why,) = rows(taken)["residual block"].left
    assert why.endswith(".weight is a Packed")
    models.step(unet, inputs)
    assert conv.weight.is_contiguous()


def test_a_block_that_is_left_has_its_weights_as_they_were(unet: Any, inputs: Any) -> None:
    """Its host computes it as without us; so do hosts that bring weights from pinned memory."""
    taken, first = take_over(unet), unet.middle_block[0].in_layers[2]
    other = unet.middle_block[-1].in_layers[2]
    plain = models.step(unet, inputs)
    assert not first.weight.is_contiguous() and not other.weight.is_contiguous()
    handle = first.register_forward_hook(lambda module, given, made: made)
    taken.take_over(anew=False)
    assert first.weight.is_contiguous() and not other.weight.is_contiguous()
    assert not first._state_dict_pre_hooks and near(models.step(unet, inputs), plain)
    handle.remove()
    taken.take_over(anew=False)
    assert torch.equal(models.step(unet, inputs), plain) and not first.weight.is_contiguous()
    taken.give_back()
    assert first.weight.is_contiguous() and other.weight.is_contiguous()


def test_pinned_memory_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host may have registered it."""
    weight = torch.randn(4, 8, 3, 3).contiguous(memory_format=torch.channels_last)
    values, place = weight.clone(), weight.data_ptr()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    restride(weight, (72, 9, 3, 1))
    assert weight.is_contiguous() and torch.equal(weight, values) and weight.data_ptr() == place


def test_pinned_memory_that_a_host_has_a_tensor_in_keeps_its_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As diffusers' group offloading, which copies it to the card when it is needed."""
    weight = torch.randn(4, 8, 3, 3).contiguous(memory_format=torch.channels_last)
    theirs, values = weight.data, weight.clone()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    restride(weight, (72, 9, 3, 1))
    assert torch.equal(theirs, values) and torch.equal(weight, values)


def test_writing_into_a_blocks_output_harms_nobody(unet: Any, inputs: Any) -> None:
    """As FreeU does, in place; and ControlNet's residuals are added outside."""
    control = models.draw(2, 64, 4, 4).to(BF16)

    def weaken(module: Any, given: Any, made: torch.Tensor) -> None:
        made[:, : made.shape[1] // 2] *= 0.5

    handles = [block.register_forward_hook(weaken) for block in unet.output_blocks]
    handles.append(unet.middle_block.register_forward_hook(lambda *call: call[-1] + control))
    theirs = models.step(unet, inputs)
    taken = take_over(unet)
    first = models.step(unet, inputs)
    assert near(first, theirs)
    assert torch.equal(models.step(unet, inputs), first)
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
    assert "over of test_unet_others.py" in next(iter(row.left))
    taken.give_back()
    assert module.forward is over
    assert torch.equal(models.step(unet, inputs), theirs)
