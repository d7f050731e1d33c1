"""What diffusers adds to a UNet's attention: masks of the prompt. What is ours with it, how exact,
and that each change counts in the next call.
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


def inputs(seed: int = 0, lengths: tuple[int, ...] = (77, 9), tokens: int = 77) -> Any:
    """What a step is given, and a mask of the prompts by their lengths."""
    given = models.in_dtype(models.diffusers_inputs("SD 1.5", seed=seed, tokens=tokens), BF16)
    mask = torch.arange(tokens) < torch.tensor(lengths)[:, None]
    return {**given, "encoder_attention_mask": mask}


def assert_all_ours(patch: Any) -> None:
    rows = patch.unet.rows()
    assert len(rows) == 6
    assert [str(row) for row in rows if row.ours < row.total or row.partly] == []


def assert_as_exact(unet: Any, given: Any, theirs: torch.Tensor, ours: torch.Tensor) -> None:
    """Ours errs at most twice as much as torch's."""
    exact = models.step(copy.deepcopy(unet).double(), models.in_dtype(given, torch.float64))
    assert models.errors(ours, exact)[1] < 2 * models.errors(theirs, exact)[1]


def test_a_mask_of_the_prompt_is_ours_and_recorded(unet: Any, desk: Desk) -> None:
    given = [inputs(0, (77, 9)), inputs(0, (1, 40)), inputs(1, (77, 77))]
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
    given = inputs(lengths=(77, 9))
    given["encoder_attention_mask"] = given["encoder_attention_mask"][:, :60]
    with host.patched(Pipeline(unet), unet=True):
        with pytest.raises((RuntimeError, ValueError)):
            models.step(unet, given)
        assert models.step(unet, inputs()).isfinite().all()


def test_prompts_with_and_without_a_mask_in_turn(unet: Any, desk: Desk) -> None:
    masked = inputs()
    plain = {key: each for key, each in masked.items() if key != "encoder_attention_mask"}
    with host.patched(Pipeline(unet), unet=True):
        launched = [models.step(unet, each).clone() for each in (masked, plain)]
        for _ in range(3):
            for each, made in zip((masked, plain), launched, strict=True):
                assert torch.equal(models.step(unet, each), made)
    assert not torch.equal(*launched)
    assert desk.replayed > 2 * PROGRAMS
