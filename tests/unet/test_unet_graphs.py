"""A UNet whose blocks are recorded: a CPU plays the device that replays them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.report import Report
from lib_rocm_sd.unet import compute
from lib_rocm_sd.unet.hook import Hook
from lib_rocm_sd.unet.takeover import UnetTakeover, take_over
from tests.graph_tape import Desk, recording_cpu
from tests.unet import unet_models as models

PROGRAMS = 16
"""Of the double: 8 residual blocks, 4 transformers with all their blocks, 2 resamplings, both ends,
.."""
SHARED = 2
""".. and what makes the time embeddings, and the prompt's keys and values, for all of them."""


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return recording_cpu(monkeypatch, baked=True)


def steps(unet: Any, inputs: Any, count: int = 2) -> list[torch.Tensor]:
    """What the UNet makes of ever other latent images, the first of which is recorded; copies, as
    samplers make of it.
    """
    return [models.step(unet, {**inputs, "x": inputs["x"] + n}).clone() for n in range(count)]


def taken_over(unet: Any) -> UnetTakeover:
    return take_over(unet, Session.of("Auto", report=Report()))


def same(made: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, made, expected))


def test_a_recorded_step_is_the_launched_one(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = taken_over(unet)
    launched = steps(unet, inputs, 4)
    taken.give_back()
    desk = recording_cpu(monkeypatch, baked=True)
    taken = taken_over(unet)
    assert same(steps(unet, inputs, 4), launched)
    assert desk.recorded == PROGRAMS + SHARED
    assert desk.replayed == 3 * (PROGRAMS + SHARED)
    assert [each.why for each in taken.graphs.known()] == [""]


@pytest.mark.parametrize("family", ["Kandinsky", "x4 upscaler"])
def test_a_recorded_step_of_other_blocks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers")
    unet = models.diffusers_unet(family).to(torch.bfloat16)
    each = [models.diffusers_inputs(family, seed=seed) for seed in range(4)]
    inputs = [models.in_dtype(one, torch.bfloat16) for one in each]
    taken = taken_over(unet)
    launched = [models.step(unet, one).clone() for one in inputs]
    taken.give_back()
    desk = recording_cpu(monkeypatch, baked=True)
    taken = taken_over(unet)
    assert same([models.step(unet, one).clone() for one in inputs], launched)
    assert desk.recorded and desk.replayed >= desk.recorded
    assert all(row.ours == row.total and not row.partly for row in taken.report())


def test_weights_written_in_place_are_read(unet: Any, inputs: Any, desk: Desk) -> None:
    taken_over(unet)
    steps(unet, inputs)
    before = steps(unet, inputs, 1)
    with torch.no_grad():
        for parameter in unet.parameters():
            parameter.mul_(0.9)
    made = steps(unet, inputs)
    assert not torch.equal(made[0], before[0])
    desk.stream += 1  # launched one by one
    assert same(steps(unet, inputs), made)


def test_weights_that_lie_elsewhere_are_recorded_anew(unet: Any, inputs: Any, desk: Desk) -> None:
    taken_over(unet)
    expected = steps(unet, inputs)
    for parameter in unet.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.preserve_format)
    assert same(steps(unet, inputs), expected)
    assert desk.recorded == 2 * (PROGRAMS + SHARED)


def halve_groups(module: Any) -> None:
    if isinstance(module, nn.GroupNorm):
        module.num_groups //= 2


def raise_eps(module: Any) -> None:
    if isinstance(module, nn.GroupNorm | nn.LayerNorm):
        module.eps = 0.5


def double_heads(module: Any) -> None:
    if type(module).__name__ == "CrossAttention":
        module.heads, module.scale = 2 * module.heads, module.scale * 2**0.5


def give_biases(module: Any) -> None:
    """As networks do to layers without one."""
    if isinstance(module, nn.Linear) and module._parameters["bias"] is None:
        made = torch.full((module.out_features,), 3.0, dtype=module.weight.dtype)
        module.bias = nn.Parameter(made, requires_grad=False)


def replace_biases(module: Any) -> None:
    if isinstance(module, nn.LayerNorm):
        module.bias = nn.Parameter(module.bias + 1, requires_grad=False)


def change_first_biases(module: Any) -> None:
    """Which the time embedding brings along."""
    if type(module).__name__ == "ResBlock":
        with torch.no_grad():
            module.in_layers[2].bias.add_(1)


def replace_first_biases(module: Any) -> None:
    if type(module).__name__ == "ResBlock":
        conv = module.in_layers[2]
        conv.bias = nn.Parameter(conv.bias + 1, requires_grad=False)


@pytest.mark.parametrize(
    "change",
    [
        *(halve_groups, raise_eps, double_heads, give_biases, replace_biases),
        *(change_first_biases, replace_first_biases),
    ],
)
def test_what_changes_in_a_block_is_read(
    unet: Any, inputs: Any, desk: Desk, change: Callable[[Any], None]
) -> None:
    """Neither shapes nor places of weights tell of all of it."""
    taken_over(unet)
    before = steps(unet, inputs)
    for module in unet.modules():
        change(module)
    made = steps(unet, inputs)
    assert not torch.equal(made[0], before[0]) and not torch.equal(made[1], before[1])
    desk.stream += 1
    assert same(steps(unet, inputs), made)


def test_a_bias_that_comes_and_goes_before_a_block_runs(unet: Any, inputs: Any, desk: Desk) -> None:
    class Networks(Hook):
        on = False

        def ready(self, leaves: Sequence[nn.Module]) -> str:
            for leaf in leaves:
                if leaf in without and self.on:
                    give_biases(leaf)
                elif leaf in without:
                    leaf._parameters["bias"] = None
            return ""

    without = {m for m in unet.modules() if isinstance(m, nn.Linear) and m.bias is None}
    hook = Networks()
    take_over(unet, Session.of("Auto", report=Report()), hook)
    before = steps(unet, inputs)
    hook.on = True
    assert not any(map(torch.equal, steps(unet, inputs), before))
    hook.on = False
    assert same(steps(unet, inputs), before)


def test_a_step_in_inference_mode_and_one_outside(unet: Any, inputs: Any, desk: Desk) -> None:
    taken = taken_over(unet)
    with torch.inference_mode():
        first = steps(unet, inputs)
    assert same(steps(unet, inputs), first)
    assert not any(row.left for row in taken.report())


def test_prompts_of_two_lengths_in_turn(unet: Any, inputs: Any, desk: Desk) -> None:
    taken_over(unet)
    long = {**inputs, "context": torch.cat([inputs["context"]] * 2, 1)}
    for _ in range(4):
        models.step(unet, inputs)
        models.step(unet, long)
    assert desk.recorded < 2 * (PROGRAMS + SHARED)


def test_weights_that_are_gone_are_freed(unet: Any, inputs: Any, desk: Desk) -> None:
    desk.baked = False
    taken = taken_over(unet)
    steps(unet, inputs)
    convs = [m for m in unet.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    old = [ref(conv.weight) for conv in convs]
    for conv in convs:
        conv.weight = nn.Parameter(conv.weight.detach().clone(), requires_grad=False)
    steps(unet, inputs)
    forget_python(taken)
    assert not [each for each in old if each() is not None]


def test_somebody_keeps_our_forward(unet: Any, inputs: Any, desk: Desk) -> None:
    desk.baked = False
    taken = taken_over(unet)
    steps(unet, inputs)
    block = next(m for m in unet.modules() if type(m).__name__ == "ResBlock")
    kept = block.forward
    forget_python(taken)
    recordings = [ref(made) for made in taken.graphs.known()[0]._kept]
    taken.give_back()
    gc.collect()
    assert kept is not None and not [each for each in recordings if each() is not None]


def forget_python(taken: UnetTakeover) -> None:
    """A device keeps no Python of what it has recorded."""
    for made in taken.graphs.known()[0]._kept:
        tape: Any = made.graph
        tape._work = None
    gc.collect()


def test_a_block_with_a_hook_is_called(unet: Any, inputs: Any, desk: Desk) -> None:
    taken_over(unet)
    expected = steps(unet, inputs)
    seen = []
    inner = next(m for m in unet.modules() if type(m).__name__ == "BasicTransformerBlock")
    handle = inner.register_forward_hook(lambda module, given, made: seen.append(1))
    apart = steps(unet, inputs)  # elsewhere rounded
    assert all(torch.allclose(*pair, atol=0.1) for pair in zip(apart, expected, strict=True))
    assert len(seen) == 2
    handle.remove()
    assert same(steps(unet, inputs), expected)
    assert len(seen) == 2


def test_an_error_in_a_block_leaves_its_transformer_ours(
    unet: Any, inputs: Any, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, layer_norm = taken_over(unet), compute.layer_norm
    expected = steps(unet, inputs)
    block = next(m for m in unet.modules() if type(m).__name__ == "BasicTransformerBlock")

    def failing(calls: Any, place: str, x: Any, norm: Any, *rest: Any, **how: Any) -> Any:
        if norm is block.norm2:
            raise ValueError("this block is wrong")
        return layer_norm(calls, place, x, norm, *rest, **how)

    monkeypatch.setattr(compute, "layer_norm", failing)
    with torch.no_grad():
        block.norm2.weight.data = block.norm2.weight.data.clone()  # recorded anew
    made = steps(unet, inputs)
    assert all(torch.allclose(*pair, atol=0.1) for pair in zip(made, expected, strict=True))
    left = {row.kind: row.total - row.ours for row in taken.report()}
    assert left["transformer"] == 0 and left["transformer block"] == 1


@pytest.mark.parametrize("spares", [True, False])
def test_without_memory_nothing_is_kept(
    unet: Any, inputs: Any, desk: Desk, monkeypatch: pytest.MonkeyPatch, spares: bool
) -> None:
    """Also where the error is passed on: the next try finds the room."""
    taken, norm_of = taken_over(unet), compute.norm_of
    steps(unet, inputs)
    fails = iter([True])

    def failing(*given: Any) -> Any:
        if next(fails, False):
            raise torch.cuda.OutOfMemoryError("out of memory")
        return norm_of(*given)

    monkeypatch.setattr(compute, "norm_of", failing)
    monkeypatch.setattr(taken._hook, "spares", spares, raising=False)
    block = next(m for m in unet.modules() if type(m).__name__ == "ResBlock")
    bias = block.out_layers[3].bias
    bias.data = bias.data.clone()  # recorded anew
    if spares:
        assert steps(unet, inputs, 1)[0].isfinite().all()
    else:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            steps(unet, inputs, 1)
    assert [each.recorded for each in taken.graphs.known()] in ([], [0])


def test_biases_of_inference_mode_are_read_by_each_block(
    unet: Any, inputs: Any, desk: Desk
) -> None:
    """They may change unnoticed."""
    with torch.inference_mode():
        for block in unet.modules():
            if type(block).__name__ == "ResBlock":
                conv = block.in_layers[2]
                conv.bias = nn.Parameter(conv.bias.clone(), requires_grad=False)
    taken_over(unet)
    for _ in range(4):
        steps(unet, inputs)
    assert desk.recorded <= 2 * (PROGRAMS + SHARED)


def test_an_attention_of_the_hosts_is_called_amid_blocks(
    unet: Any, inputs: Any, desk: Desk
) -> None:
    taken_over(unet)
    expected = steps(unet, inputs)
    seen, inner = [], next(m for m in unet.modules() if type(m).__name__ == "BasicTransformerBlock")
    theirs = inner.attn2.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return theirs(*args, **kwargs)

    inner.attn2.forward = forward
    made = steps(unet, inputs)
    assert len(seen) == 2
    assert all(torch.allclose(*pair, atol=0.1) for pair in zip(made, expected, strict=True))


def test_other_sizes_and_batches_in_turn(unet: Any, inputs: Any, desk: Desk) -> None:
    taken = taken_over(unet)
    wide = {**inputs, "x": torch.cat([inputs["x"]] * 2, -1)}
    both = [each for _ in range(4) for each in (inputs, wide)]
    made = [models.step(unet, each).clone() for each in both]
    desk.stream += 1
    assert same([models.step(unet, each) for each in both], made)
    assert desk.recorded == 2 * PROGRAMS + SHARED, "embedding and prompt are the same for both"
    taken.give_back()
    assert taken.graphs.known() == []


def test_given_back_it_is_the_hosts(unet: Any, inputs: Any, desk: Desk) -> None:
    theirs = steps(unet, inputs, 2)
    taken = taken_over(unet)
    steps(unet, inputs)
    taken.give_back()
    assert same(steps(unet, inputs, 2), theirs)
