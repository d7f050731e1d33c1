"""Keys and values of a prompt, which are made for all transformer blocks at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.report import Report
from lib_rocm_sd.unet import shared
from lib_rocm_sd.unet.hook import Hook
from lib_rocm_sd.unet.takeover import UnetTakeover, take_over
from tests.graph_tape import recording_cpu
from tests.unet import unet_models as models


def taken_over(unet: Any, hook: Hook | None = None) -> UnetTakeover:
    return take_over(unet, Session.of("Auto", report=Report()), hook)


def apart(unet: Any, inputs: Any) -> torch.Tensor:
    """A step by blocks that make keys and values themselves."""
    taken = taken_over(unet)
    taken._prompts.parts = ()
    made = models.step(unet, inputs).clone()
    taken.give_back()
    return made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each block that asks whether there was something ready for it."""
    found: list[bool] = []
    of = shared.Prompts.of

    def noted(self: Any, *args: Any) -> Any:
        ready = of(self, *args)
        found.append(ready is not None)
        return ready

    monkeypatch.setattr(shared.Prompts, "of", noted)
    return found


def test_every_block_takes_them(unet: Any, inputs: Any, asked: list[bool]) -> None:
    taken = taken_over(unet)
    made = models.step(unet, inputs).clone()
    assert asked == [True] * len(taken._prompts.parts) == [True] * 8
    assert taken._prompts._step is None, "kept after the last block"
    taken.give_back()
    assert torch.equal(made, apart(unet, inputs))


def test_each_step_reads_prompt_and_weights_anew(unet: Any, inputs: Any) -> None:
    """They may have been written to unnoticed."""
    taken = taken_over(unet)
    models.step(unet, inputs)
    inputs["context"].data.mul_(1.5)
    first = models.step(unet, inputs).clone()
    assert torch.equal(first, apart(copy.deepcopy(unet), inputs))
    taken._prompts.parts[3].layers[0].weight.data.add_(0.25)
    second = models.step(unet, inputs).clone()
    assert torch.equal(second, apart(copy.deepcopy(unet), inputs))
    assert not torch.equal(first, second)


def test_who_asks_again_is_in_another_step(unet: Any, inputs: Any) -> None:
    """Also where others did not ask in the one before."""
    held, prompt = taken_over(unet)._prompts, inputs["context"]
    first = held.of(prompt, held.parts[0])
    prompt.data.mul_(1.5)
    again = held.of(prompt, held.parts[0])
    assert first is not None and again is not None and not torch.equal(first.rows, again.rows)
    assert held.of(prompt, held.parts[1]) is again


def test_another_stream_makes_them_itself(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, stream = taken_over(unet), 0
    monkeypatch.setattr(shared, "_stream", lambda tensor: stream)
    held, parts = taken._prompts, taken._prompts.parts
    first = held.of(inputs["context"], parts[0])
    stream = 1
    second = held.of(inputs["context"], parts[1])
    third = held.of(inputs["context"], parts[2])
    assert first is not None and second is third and second is not first


def rewrite(unet: Any, inputs: Any) -> None:
    with torch.no_grad():
        for parameter in unet.parameters():
            parameter.mul_(0.9)


def move(unet: Any, inputs: Any) -> None:
    for parameter in unet.parameters():
        parameter.data = parameter.data.clone().mul_(1.1)


def change_the_prompt(unet: Any, inputs: Any) -> None:
    inputs["context"].mul_(1.5)


def give_biases(unet: Any, inputs: Any) -> None:
    for module in unet.modules():
        if type(module).__name__ == "CrossAttention":
            made = torch.full((module.to_v.out_features,), 3.0, dtype=module.to_v.weight.dtype)
            module.to_v.bias = torch.nn.Parameter(made, requires_grad=False)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("change", [rewrite, move, change_the_prompt, give_biases])
def test_what_changes_is_read(
    unet: Any,
    inputs: Any,
    change: Callable[[Any, Any], None],
    recorded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the same prompt, the very same tensor."""
    if recorded:
        recording_cpu(monkeypatch, baked=True)
    taken = taken_over(unet)
    for _ in range(3):
        before = models.step(unet, inputs).clone()
    change(unet, inputs)
    made = [models.step(unet, inputs).clone() for _ in range(3)]
    taken.give_back()
    assert not torch.equal(made[0], before)
    expected = apart(unet, inputs)
    assert all(torch.equal(each, expected) for each in made)


@pytest.mark.parametrize("recorded", [False, True])
def test_fewer_blocks_are_ours_from_a_step_on(
    unet: Any, inputs: Any, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others lie elsewhere side by side then: what was recorded of the columns is not replayed."""
    if recorded:
        recording_cpu(monkeypatch, baked=True)
    taken = taken_over(unet)
    expected = [models.step(unet, inputs).clone() for _ in range(3)][0]
    taken._prompts.parts = taken._prompts.parts[2:]
    made = [models.step(unet, inputs).clone() for _ in range(3)]
    taken._prompts.parts = taken._prompts.parts[::-1]
    made += [models.step(unet, inputs).clone() for _ in range(3)]
    assert all(torch.equal(each, expected) for each in made)


def test_another_prompt_amid_a_step(unet: Any, inputs: Any) -> None:
    """As of regions: each is made for all, and the right one is given."""
    taken = taken_over(unet)
    held, part = taken._prompts, taken._prompts.parts[-1]
    one, two = inputs["context"], inputs["context"] + 1
    first, second, again = (held.of(each, part) for each in (one, two, one))
    assert first is not None and second is not None and again is not None
    assert torch.equal(first.rows, again.rows) and not torch.equal(first.rows, second.rows)


def test_a_replaced_layer_has_them_made_no_more_often(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks before it were asked whether their transformer can be one program."""
    steps: list[Any] = []
    of = shared.Prompts._made

    def noted(self: Any, context: Any) -> Any:
        steps.append(context)
        return of(self, context)

    monkeypatch.setattr(shared.Prompts, "_made", noted)
    expected = apart(unet, inputs)
    steps.clear()
    taken = taken_over(unet)
    for block in [m for m in unet.modules() if type(m).__name__ == "BasicTransformerBlock"][1::2]:
        block.attn1.forward = block.attn1.forward
        block.ff.register_forward_hook(lambda module, args, made: made)
    for _ in range(2):
        assert models.errors(models.step(unet, inputs), expected)[1] < 0.02
    assert any(row.partly for row in taken.report())
    assert len(steps) == 2


class Refusing(Hook):
    """Keys and values are not to be read, as where networks are computed in the layers."""

    def ready(self, leaves: Any) -> str:
        wanted = {leaf.out_features for leaf in leaves if isinstance(leaf, torch.nn.Linear)}
        return "not these" if len(leaves) == 16 and wanted else ""


def test_who_may_not_read_them_makes_them_alone(unet: Any, inputs: Any, asked: list[bool]) -> None:
    taken = taken_over(unet, Refusing())
    made = models.step(unet, inputs).clone()
    assert asked == [False] * 8
    taken.give_back()
    assert torch.equal(made, apart(unet, inputs))


def test_a_long_prompt_is_made_block_by_block(
    unet: Any, inputs: Any, asked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "MOST_PROMPT_BYTES", 1000)
    taken_over(unet)
    models.step(unet, inputs)
    assert asked == [False] * 8


def test_a_prompt_made_in_inference_mode_is_told_or_left(
    unet: Any, inputs: Any, asked: list[bool]
) -> None:
    """It counts no changes."""

    class Telling(Hook):
        tells = True

    with torch.inference_mode():
        given = {**inputs, "context": inputs["context"].clone()}
    expected = apart(unet, inputs)
    for hook, ready in ((None, False), (Telling(), True)):
        asked.clear()
        taken = taken_over(unet, hook)
        with torch.inference_mode():
            made = models.step(unet, given)
        taken.give_back()
        assert asked == [ready] * 8 and torch.equal(made, expected)
