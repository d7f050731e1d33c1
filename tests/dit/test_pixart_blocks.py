"""PixArt's blocks in a real diffusers transformer, with prompts of several lengths: ours, right,
given back.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.unet.takeover import UnetTakeover
from tests.dit.any_transformer import (
    check_adapters,
    check_blocks,
    check_recorded,
    copied,
    filled,
    ours_within_patched,
    taken_over,
)

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")


WORDS, WIDTH = 7, 72


@cache
def _drawn() -> nn.Module:
    torch.manual_seed(0)
    made = diffusers.PixArtTransformer2DModel(
        num_attention_heads=3,
        attention_head_dim=24,
        num_layers=3,
        cross_attention_dim=WIDTH,
        sample_size=16,
        caption_channels=32,
        use_additional_conditions=False,
    )
    return filled(made)  # type: ignore[no-any-return]


def model(dtype: torch.dtype = torch.bfloat16) -> Any:
    return copied(_drawn(), dtype)


def step(transformer: Any, turn: int = 1, masked: bool = True) -> torch.Tensor:
    """On two pictures that are not square, of prompts of seven and, `masked`, four words."""
    generator, dtype = torch.Generator().manual_seed(turn), transformer.dtype
    x, words = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((2, 4, 10, 6), (2, WORDS, 32))
    )
    mask = torch.ones(2, WORDS)
    mask[1, 4:] = 0
    with torch.no_grad():
        made: torch.Tensor = transformer(
            x,
            encoder_hidden_states=words,
            timestep=torch.tensor([500, 20]),
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            encoder_attention_mask=mask if masked else None,
        ).sample
    return made.clone()


@pytest.mark.parametrize("masked", [True, False], ids=["masked", ""])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_blocks_are_ours_as_exact_as_the_hosts_and_given_back(
    dtype: torch.dtype, masked: bool
) -> None:
    def check(taken: UnetTakeover) -> None:
        (row,) = taken.report()
        assert (row.kind, row.ours, row.total, row.left) == ("transformer block", 3, 3, {})

    check_blocks(model(dtype), lambda each, turn: step(each, turn, masked), check)


@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
def test_adapters_of_peft_count_while_they_are_on(use_dora: bool) -> None:
    layers = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]
    check_adapters(_drawn(), step, layers, use_dora=use_dora)


def test_a_recorded_step_is_the_launched_one(monkeypatch: pytest.MonkeyPatch) -> None:
    desk, _ = check_recorded(model(), step, monkeypatch)
    assert desk.recorded == 3 and desk.replayed == 9


def test_masked_words_do_not_count() -> None:
    transformer = model()
    assert not torch.equal(step(transformer), step(transformer, masked=False))


def test_a_table_that_is_replaced_counts() -> None:
    transformer = model()
    taken_over(transformer)
    before = step(transformer)
    block = transformer.transformer_blocks[1]
    block.scale_shift_table = nn.Parameter(block.scale_shift_table + 1, requires_grad=False)
    ours = step(transformer)
    assert (ours - before).abs().max() > 0.1
    exact = step(copy.deepcopy(transformer).double())
    assert (ours - exact).abs().max() < 0.1


def test_what_was_changed_is_the_hosts_and_says_why() -> None:
    transformer = model()
    taken = taken_over(transformer)
    step(transformer)
    first, second, third = transformer.transformer_blocks
    first.norm2 = nn.LayerNorm(WIDTH).bfloat16()
    second.ff.net[0].approximate = "none"
    third.set_chunk_feed_forward(1)
    third.attn2 = None
    (row,) = taken.report()
    assert row.ours == 0 and list(row.left) == [
        "norm2 has a weight, or is over several dimensions",
        "ff.net.0.approximate is none",
        "block._chunk_size is 1; attn2 is missing",
    ]


def test_calls_of_other_forms_are_the_hosts_and_say_why() -> None:
    transformer = model()
    taken = taken_over(transformer)
    x, context = (torch.randn(2, tokens, WIDTH).bfloat16() for tokens in (15, WORDS))
    given: dict[str, Any] = {
        "encoder_hidden_states": context,
        "timestep": torch.randn(2, 6 * WIDTH).bfloat16(),
    }
    said = lambda: [why for row in taken.report() for why in row.left]  # noqa: E731
    block, mask = transformer.transformer_blocks[0], torch.zeros(2, 1, 15).bfloat16()
    block(x, attention_mask=mask, **given)
    assert said() == ["attention to the picture has a mask"]
    block(x, encoder_attention_mask=mask[..., :WORDS].float(), **given)
    assert said() == ["attention to the prompt has a mask float32 (2, 1, 7)"]
    block(x, **given)
    assert said() == []


def test_patched_takes_a_pipelines_transformer_over() -> None:
    assert ours_within_patched(model()) == {"transformer block": 3}
