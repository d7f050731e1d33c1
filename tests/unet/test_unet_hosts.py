"""What a host says of its UNet before a block runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.report import Report
from lib_rocm_sd.unet import compute
from lib_rocm_sd.unet.hook import Hook
from lib_rocm_sd.unet.takeover import take_over
from tests.unet import unet_models as models

BF16 = torch.bfloat16


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


def test_time_embeddings_and_prompts_are_made_together(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, linear = [], compute.linear

    def counted(calls: Any, place: str, x: Any, *layers: Any, **kwargs: Any) -> Any:
        counts.append(len(layers))
        return linear(calls, place, x, *layers, **kwargs)

    monkeypatch.setattr(compute, "linear", counted)
    taken = take_over(unet)
    joint = models.step(unet, inputs)
    assert counts[:2] == [8, 16]  # residual blocks; keys and values of transformer blocks
    assert len(counts) == 2 + 8 * 3 + 4 * 2
    taken._embeddings.timed = taken._prompts.parts = ()
    assert torch.equal(models.step(unet, inputs), joint)


def test_products_are_added_in_place_and_their_biases_by_norms(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a transformer that is one program. A block that is called as a module writes to nothing
    that it is given.
    """
    noted: list[tuple[str, int, bool]] = []
    layer_norm = compute.layer_norm

    def norm(
        calls: Any, place: str, x: Any, norm: Any, rest: Any = (), *given: Any, **to: Any
    ) -> Any:
        normed, after, left = layer_norm(calls, place, x, norm, rest, *given, **to)
        noted.append((place, sum(row.ndim == 1 for row in rest), after is x))
        return normed, after, left

    monkeypatch.setattr(compute, "layer_norm", norm)
    take_over(unet)
    models.step(unet, inputs)
    joined = [("norm1", 0, True), ("norm2", 1, True), ("norm3", 2, False)]
    assert noted == joined * 8
    blocks = [m for m in unet.modules() if type(m).__name__ == "BasicTransformerBlock"]
    blocks[0].register_forward_hook(lambda *given: None)
    del noted[:]
    models.step(unet, inputs)
    alone = [("norm1", 0, True), ("norm2", 0, False), ("norm3", 1, False)]
    assert noted == alone * 2 + joined * 6, "who looks at a block gets all of it"


def test_what_a_block_is_given_is_not_written_to(unet: Any, inputs: Any) -> None:
    given = []
    take_over(unet)
    for module in unet.modules():
        if type(module).__name__ == "BasicTransformerBlock":
            module.register_forward_pre_hook(lambda _, args: given.append((args[0], args[0] + 0)))
    models.step(unet, inputs)
    assert len(given) == 8 and all(torch.equal(x, before) for x, before in given)


@pytest.mark.parametrize("what", ["the layer", "the convolution's bias"])
def test_an_embedding_layer_that_changes_amid_a_step_is_read_again(
    unet: Any, inputs: Any, what: str
) -> None:
    taken = take_over(unet)
    before = models.step(unet, inputs)
    block = unet.output_blocks[3][0]
    changes = block.emb_layers[1].weight if what == "the layer" else block.in_layers[2].bias

    def change(*_: Any) -> None:
        with torch.no_grad():
            changes.add_(0.5)

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
