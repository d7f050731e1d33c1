"""Keys and values of a prompt, which are made for all transformer blocks at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.report import Report
from lib_rocm_sd.unet import prompts
from lib_rocm_sd.unet.hook import Hook
from lib_rocm_sd.unet.takeover import UnetTakeover, take_over
from tests.graph_tape import recording_cpu
from tests.unet import unet_models as models
from tests.unet.looking import near


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
    of = prompts.Prompts.of

    def noted(self: Any, *args: Any) -> Any:
        ready = of(self, *args)
        found.append(ready is not None)
        return ready

    monkeypatch.setattr(prompts.Prompts, "of", noted)
    return found


def test_every_block_takes_them(unet: Any, inputs: Any, asked: list[bool]) -> None:
    taken = taken_over(unet)
    made = models.step(unet, inputs).clone()
    assert asked == [True] * len(taken._prompts.parts) == [True] * 8
    taken.give_back()
    assert torch.equal(made, apart(unet, inputs))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One for each time that keys and values were made for all blocks."""
    found: list[bool] = []
    joint = prompts._joint

    def noted(*args: Any, **kwargs: Any) -> Any:
        found.append(True)
        return joint(*args, **kwargs)

    monkeypatch.setattr(prompts, "_joint", noted)
    return found


def kept_rows(taken: UnetTakeover) -> Callable[[], Any]:
    """What tells whether they are still there."""
    made = taken._prompts._made
    return (lambda: None) if made is None or made.ready is None else weakref.ref(made.ready.rows)


def test_steps_with_the_same_tensor_make_them_once(
    unet: Any, inputs: Any, made: list[bool]
) -> None:
    taken = taken_over(unet)
    expected = [models.step(unet, inputs).clone() for _ in range(3)]
    assert len(made) == 1 and all(torch.equal(each, expected[0]) for each in expected)
    again = {**inputs, "context": inputs["context"].clone()}
    assert torch.equal(models.step(unet, again), expected[0]) and len(made) == 2
    rows = kept_rows(taken)
    assert rows() is not None
    del again
    assert kept_rows(taken)() is None and rows() is None, "kept after its prompt"
    models.step(unet, inputs)
    taken.weights_changed()
    assert torch.equal(models.step(unet, inputs), expected[0]) and len(made) == 4


def test_weights_that_change_between_steps_make_them_again(
    unet: Any, inputs: Any, made: list[bool], asked: list[bool]
) -> None:
    """For all blocks at once; amid a step a block makes its own."""
    taken = taken_over(unet)
    models.step(unet, inputs)
    with torch.no_grad():
        for part in taken._prompts.parts[3:5]:
            part.to_k.weight.mul_(0.5)
    first = models.step(unet, inputs).clone()  # a transformer amid which they change is in parts
    assert len(made) == 2 and all(asked)
    changed = models.step(unet, inputs).clone()
    assert near(first, changed) and len(made) == 2
    taken.give_back()
    assert torch.equal(changed, apart(unet, inputs))


def test_another_stream_makes_them_itself_and_a_capture_leaves_nothing(
    unet: Any, inputs: Any, made: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, where = taken_over(unet), prompts._Where(0, False)
    monkeypatch.setattr(prompts._Where, "now", lambda device: where)
    expected = models.step(unet, inputs).clone()
    for each, count in (
        (prompts._Where(1, False), 2),
        (prompts._Where(1, True), 3),
        (prompts._Where(1, True), 4),
        (prompts._Where(1, False), 5),
        (prompts._Where(1, False), 5),
    ):
        where = each
        assert torch.equal(models.step(unet, inputs), expected)
        assert len(made) == count and (kept_rows(taken)() is None) == where.captured


def test_recorded_they_are_made_once_where_graphs_read_them(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launched, recorded when the same prompt comes again, and kept from then on."""
    desk = recording_cpu(monkeypatch, baked=True)
    taken = taken_over(unet)
    expected = models.step(unet, inputs).clone()
    assert kept_rows(taken)() is None
    for _ in range(2):
        assert torch.equal(models.step(unet, inputs), expected)
    rows, replayed = kept_rows(taken)(), desk.replayed
    assert rows is not None and any(result.holds(rows) for result in desk.results)
    assert torch.equal(models.step(unet, inputs), expected)
    assert kept_rows(taken)() is rows
    programs = desk.replayed - replayed
    del rows
    again = {**inputs, "context": inputs["context"].clone()}
    assert torch.equal(models.step(unet, again), expected)
    assert desk.replayed == replayed + 2 * programs + 1


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
    monkeypatch.setattr(prompts, "MOST_PROMPT_BYTES", 1000)
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
