"""What diffusers changes in a UNet's attention: masks of the prompt, fused projections. What is
ours with it, how exact, and that each change counts in the next call.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.graph_tape import Desk, recording_cpu
from tests.unet import unet_models as models

pytest.importorskip("diffusers", reason="diffusers is not installed")

from lib_rocm_sd.hosts.diffusers import pipeline as host
from tests.hosts.test_diffusers_unet import Pipeline

BF16 = torch.bfloat16
PROGRAMS = 19
"""Of the UNet: 8 residual blocks, 4 transformers, 2 resamplings, 3 first and last layers, and what
makes the time embeddings, and the prompt's keys and values, for all of them.
"""


@pytest.fixture(scope="module")
def shared() -> Any:
    return models.diffusers_unet("SD 1.5").to(BF16)


@pytest.fixture
def unet(shared: Any) -> Any:
    return copy.deepcopy(shared)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    yield recording_cpu(monkeypatch, baked=True)


def plain(seed: int = 0) -> Any:
    """What a step is given."""
    return models.in_dtype(models.diffusers_inputs("SD 1.5", seed=seed), BF16)


def masked(lengths: tuple[int, int], seed: int = 0) -> Any:
    """The same with a mask of both prompts by their lengths."""
    mask = torch.arange(77) < torch.tensor(lengths)[:, None]
    return {**plain(seed), "encoder_attention_mask": mask}


def assert_all_ours(patch: Any) -> None:
    rows = patch.unet.rows()
    assert len(rows) == 6
    assert [str(row) for row in rows if row.ours < row.total or row.partly] == []


def assert_as_exact(unet: Any, given: Any, theirs: torch.Tensor, ours: torch.Tensor) -> None:
    """Ours errs at most twice as much as torch's."""
    exact = models.step(copy.deepcopy(unet).double(), models.in_dtype(given, torch.float64))
    assert models.errors(ours, exact)[1] < 2 * models.errors(theirs, exact)[1]


def test_a_mask_of_the_prompt_is_ours_and_recorded(unet: Any, desk: Desk) -> None:
    given = [masked((77, 9)), masked((1, 40)), masked((77, 77), seed=1)]
    theirs = [models.step(unet, each) for each in given]
    with host.patched(Pipeline(unet), unet=True) as patch:
        models.step(unet, given[0])
        ours = [models.step(unet, each).clone() for each in given]
        assert_all_ours(patch)
        assert (desk.recorded, desk.replayed) == (PROGRAMS, 3 * PROGRAMS)
    for each, made, expected in zip(given, ours, theirs, strict=True):
        assert_as_exact(unet, each, expected, made)
        assert torch.equal(models.step(unet, each), expected)


def test_a_mask_that_does_not_fit_is_the_hosts(unet: Any) -> None:
    """diffusers pads it by as many keys as there are, which then are too many."""
    given = masked((77, 9))
    given["encoder_attention_mask"] = given["encoder_attention_mask"][:, :60]
    with host.patched(Pipeline(unet), unet=True):
        with pytest.raises((RuntimeError, ValueError)):
            models.step(unet, given)
        assert models.step(unet, plain()).isfinite().all()


def test_prompts_with_and_without_a_mask_in_turn(unet: Any, desk: Desk) -> None:
    both = masked((77, 9)), plain()
    with host.patched(Pipeline(unet), unet=True):
        launched = [models.step(unet, each).clone() for each in both]
        for _ in range(3):
            for each, made in zip(both, launched, strict=True):
                assert torch.equal(models.step(unet, each), made)
    assert not torch.equal(*launched)
    assert desk.replayed > 2 * PROGRAMS


def test_fused_projections_are_ours_and_recorded(unet: Any, desk: Desk) -> None:
    given, before = plain(), models.step(unet, plain())
    with torch.no_grad():
        unet.fuse_qkv_projections()
        for name, layer in unet.named_modules():
            if name.endswith(("to_qkv", "to_kv")):
                layer.weight.mul_(1.5)  # so that it matters which layers are read
    theirs = models.step(unet, given)
    with host.patched(Pipeline(unet), unet=True) as patch:
        for _ in range(3):
            ours = models.step(unet, given).clone()
        assert_all_ours(patch)
        assert (desk.recorded, desk.replayed) == (PROGRAMS, 2 * PROGRAMS)
    assert_as_exact(unet, given, theirs, ours)
    assert models.errors(ours, before)[1] > 2 * models.errors(ours, theirs)[1]
    assert torch.equal(models.step(unet, given), theirs)


def test_projections_that_are_fused_and_no_more_count_at_once(unet: Any) -> None:
    """diffusers keeps the processors of before, which were ours: they are its own when ours end."""
    given = plain()
    theirs = models.step(unet, given)
    with host.patched(Pipeline(unet), unet=True) as patch:
        first = models.step(unet, given)
        with torch.no_grad():
            unet.fuse_qkv_projections()
        assert torch.equal(models.step(unet, given), first)
        assert_all_ours(patch)
        unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_qkv.weight.data.mul_(2)
        changed = models.step(unet, given)
        assert models.errors(changed, first)[1] > 0.01
        unet.unfuse_qkv_projections()
        assert torch.equal(models.step(unet, given), first)
        assert_all_ours(patch)
        unet.fuse_qkv_projections()
    unet.unfuse_qkv_projections()
    assert torch.equal(models.step(unet, given), theirs)
