"""Qwen-Image's blocks in a real diffusers transformer: ours, right, given back."""

from __future__ import annotations

import contextlib
import inspect
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

import lib_rocm_sd.hosts.read  # noqa: F401 - knows diffusers' classes
from lib_rocm_sd.hosts.read import qwen
from lib_rocm_sd.unet.takeover import UnetTakeover
from tests.dit.any_transformer import (
    check_blocks,
    check_recorded,
    copied,
    filled,
    masks_seen,
    taken_over,
)

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
if not hasattr(diffusers, "QwenImageTransformer2DModel"):
    pytest.skip("this diffusers has no Qwen-Image", allow_module_level=True)

PROCESSOR: Any = vars(diffusers.models.transformers.transformer_qwenimage)[qwen.PROCESSOR]
APPLIES_MASKS = "image_mask" in PROCESSOR.__call__.__code__.co_varnames
needs_masks = pytest.mark.skipif(not APPLIES_MASKS, reason="this diffusers ignores the mask")
TITLE = "joint transformer block"
WORDS = 7


@cache
def _drawn() -> nn.Module:
    torch.manual_seed(0)
    made = diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=3,
        attention_head_dim=24,
        num_attention_heads=4,
        joint_attention_dim=32,
        axes_dims_rope=(4, 8, 12),
    )
    return filled(made)  # type: ignore[no-any-return]


def model(dtype: torch.dtype = torch.bfloat16) -> Any:
    return copied(_drawn(), dtype)


def step(transformer: Any, turn: int = 1, masked: str = "") -> torch.Tensor:
    """On two pictures that are not square, of two prompts of seven words."""
    generator, dtype = torch.Generator().manual_seed(turn), transformer.dtype
    x, words = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 15, 16), (2, WORDS, 32))
    )
    mask = torch.ones(2, WORDS, dtype=torch.bool)
    mask[1, 4 : 6 if masked == "a gap" else WORDS] = False
    older = "txt_seq_lens" in inspect.signature(type(transformer).forward).parameters
    with torch.no_grad():
        made: torch.Tensor = transformer(
            hidden_states=x,
            encoder_hidden_states=words,
            encoder_hidden_states_mask=mask if masked else None,
            timestep=torch.tensor([0.5, 0.25]).to(dtype),
            img_shapes=[[(1, 5, 3)]] * 2,
            **({"txt_seq_lens": [WORDS] * 2} if older else {}),
        ).sample
    return made.clone()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_blocks_are_ours_as_exact_as_the_hosts_and_given_back(dtype: torch.dtype) -> None:
    transformer = model(dtype)

    def check(taken: UnetTakeover) -> None:
        (row,) = taken.report()
        assert (row.kind, row.ours, row.total, row.left) == (TITLE, 3, 3, {})

    check_blocks(transformer, step, check)


@needs_masks
@pytest.mark.parametrize(
    ("masked", "kind"), [("a length", torch.int32), ("a gap", torch.bool)], ids=str
)
def test_the_masked_words_of_a_prompt_are_left_out(
    monkeypatch: pytest.MonkeyPatch, masked: str, kind: torch.dtype
) -> None:
    """Where they are the last, attention is given how many are not."""
    seen = masks_seen(monkeypatch)

    def check(taken: UnetTakeover) -> None:
        (row,) = taken.report()
        assert (row.kind, row.ours, row.total, row.left) == (TITLE, 3, 3, {})
        assert {mask is not None and mask.dtype for mask in seen} == {kind}

    check_blocks(model(), lambda each, turn: step(each, turn, masked), check)


def test_a_recorded_step_is_the_launched_one(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = model()
    desk, _ = check_recorded(transformer, step, monkeypatch)
    assert desk.recorded == 3 and desk.replayed == 9


@needs_masks
def test_a_recorded_step_with_a_mask_is_the_launched_one(monkeypatch: pytest.MonkeyPatch) -> None:
    desk, _ = check_recorded(model(), partial(step, masked="a length"), monkeypatch)
    assert desk.recorded == 3


@pytest.mark.parametrize(("stream", "asked", "answer"), [("img", 0, 1), ("txt", 1, 0)])
def test_both_streams_are_clipped_in_fp16(stream: str, asked: int, answer: int) -> None:
    block = model(torch.float16).transformer_blocks[0]
    block.get_submodule(f"{stream}_mod.1").bias += 4.0
    block.get_submodule(f"{stream}_mlp.net.2").bias += 1000.0
    drawn = [torch.randn(shape).half() for shape in ((2, 15, 96), (2, WORDS, 96), (2, 96))]
    drawn[asked] = 63000 * drawn[asked].sign()
    given = (*drawn[:2], None, drawn[2])
    theirs = block(*given)
    taken = taken_over(nn.ModuleList([block]))
    ours = block(*given)
    assert taken.report()[0].ours == 1
    assert theirs[answer].abs().max() == 65504
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, right, atol=64, rtol=0.01, equal_nan=True)


def test_a_mask_that_does_not_fit_or_is_ignored_is_the_hosts_and_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = model().transformer_blocks[0]
    taken = taken_over(nn.ModuleList([block]))
    x, words, time = (torch.randn(shape).bfloat16() for shape in ((2, 15, 96), (2, 7, 96), (2, 96)))
    given = x, words, torch.ones(1, WORDS, dtype=torch.bool), time
    with contextlib.suppress(RuntimeError):  # the host's, of sizes
        block(*given)
    (why,) = taken.report()[0].left
    if APPLIES_MASKS:
        assert why == "its mask for the prompt is not bool (2, 7)"
        monkeypatch.setattr(qwen, "APPLIED", "another name")
        with contextlib.suppress(RuntimeError):
            block(*given)
        why = [*taken.report()[0].left][-1]
    assert why == "it is given a mask, which this diffusers ignores"


def test_what_was_changed_is_the_hosts_and_says_why() -> None:
    transformer = model()
    taken = taken_over(transformer)
    step(transformer)
    first, second, third = transformer.transformer_blocks
    first.attn.norm_added_k.eps = 1e-3
    second.txt_mod[0] = nn.GELU()
    third.attn.set_processor(type("Mine", (type(third.attn.processor),), {})())
    (row,) = taken.report()
    assert row.ours == 0 and [why.split(" of ")[0] for why in row.left] == [
        "attn: its norm_added_q and norm_added_k are unlike",
        "txt_mod.0 is a GELU, not SiLU",
        "attn.processor is a Mine",
    ]
