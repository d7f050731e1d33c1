"""Chroma's blocks in a real diffusers transformer, with the masks its pipeline gives: ours, right,
given back.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import lib_rocm_sd.hosts.read  # noqa: F401 - knows diffusers' classes
from lib_rocm_sd.unet.takeover import UnetTakeover
from tests.dit.any_transformer import (
    check_adapters,
    check_blocks,
    check_recorded,
    copied,
    filled,
    taken_over,
)

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
if not hasattr(diffusers, "ChromaTransformer2DModel"):
    pytest.skip("this diffusers has no Chroma", allow_module_level=True)

WORDS, TOKENS = 7, 15


@cache
def _drawn() -> nn.Module:
    torch.manual_seed(0)
    made = diffusers.ChromaTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=24,
        num_attention_heads=4,
        joint_attention_dim=32,
        axes_dims_rope=(4, 8, 12),
        approximator_num_channels=8,
        approximator_hidden_dim=32,
        approximator_layers=2,
    )
    return filled(made)  # type: ignore[no-any-return]


def model(dtype: torch.dtype = torch.bfloat16) -> Any:
    return copied(_drawn(), dtype)


def masks(kind: str, dtype: torch.dtype) -> torch.Tensor | None:
    """For all tokens of two pictures, the second of four words: as the pipeline makes it, "float",
    where attention adds it to the scores; or none.
    """
    if kind == "none":
        return None
    mask = torch.ones(2, WORDS + TOKENS, dtype=torch.bool)
    mask[1, 4:WORDS] = False
    return mask if kind == "bool" else mask.to(dtype)


def step(transformer: Any, turn: int = 1, kind: str = "float") -> torch.Tensor:
    """On two pictures that are not square, of two prompts of seven words."""
    generator, dtype = torch.Generator().manual_seed(turn), transformer.dtype
    x, words = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((2, TOKENS, 16), (2, WORDS, 32))
    )
    places = torch.zeros(5, 3, 3)
    places[..., 1], places[..., 2] = torch.arange(5)[:, None], torch.arange(3)
    with torch.no_grad():
        made: torch.Tensor = transformer(
            hidden_states=x,
            encoder_hidden_states=words,
            timestep=torch.tensor([0.5, 0.02]).to(dtype),
            img_ids=places.flatten(0, 1),
            txt_ids=torch.zeros(WORDS, 3),
            attention_mask=masks(kind, dtype),
        ).sample
    return made.clone()


@pytest.mark.parametrize("kind", ["float", "bool", "none"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_blocks_are_ours_as_exact_as_the_hosts_and_given_back(
    dtype: torch.dtype, kind: str
) -> None:
    def check(taken: UnetTakeover) -> None:
        counts = {row.kind: (row.ours, row.total, row.left) for row in taken.report()}
        assert counts == {
            "joint transformer block": (2, 2, {}),
            "single transformer block": (3, 3, {}),
        }

    check_blocks(model(dtype), lambda each, turn: step(each, turn, kind), check)


@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
def test_adapters_of_peft_count_while_they_are_on(use_dora: bool) -> None:
    layers = ["to_q", "to_v", "to_out.0", "add_k_proj", "to_add_out", "proj_mlp", "proj_out"]
    check_adapters(_drawn(), step, [*layers, "ff.net.2"], use_dora=use_dora)


def test_a_recorded_step_is_the_launched_one(monkeypatch: pytest.MonkeyPatch) -> None:
    desk, _ = check_recorded(model(), step, monkeypatch)
    assert desk.recorded == 5 and desk.replayed == 15


def test_a_mask_counts() -> None:
    """In the place of one that adds to all scores alike, which would be none."""
    transformer = model(torch.float32)
    assert (step(transformer) - step(transformer, kind="none")).abs().max() > 1e-3


def test_another_mask_or_norm_is_the_hosts_and_says_why() -> None:
    transformer = model()
    taken = taken_over(transformer)
    rows = torch.randn(2, 12, 96).bfloat16()
    x, context = (torch.randn(2, tokens, 96).bfloat16() for tokens in (TOKENS, WORDS))
    double, single = transformer.transformer_blocks[0], transformer.single_transformer_blocks[0]
    mask = torch.ones(1, WORDS + TOKENS).bfloat16()
    double(x, context, rows, attention_mask=mask)
    single(torch.cat((context, x), 1), rows[:, :3], attention_mask=mask.expand(2, -1))
    transformer.single_transformer_blocks[1].norm.norm = nn.LayerNorm(96)
    said = [list(row.left) for row in taken.report()]
    assert said == [
        ["attention is given a mask bfloat16 (1, 22)"],
        ["norm.norm has a weight, or is over several dimensions"],
    ]
