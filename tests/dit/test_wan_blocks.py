"""Wan's blocks in a real diffusers transformer: ours, right, given back."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.hosts.read import crossed
from lib_rocm_sd.unet.takeover import UnetTakeover
from tests.dit.any_transformer import check_blocks, check_recorded, filled, taken_over

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
if not hasattr(diffusers, "WanTransformer3DModel"):
    pytest.skip("this diffusers has no Wan", allow_module_level=True)

WORDS, WIDTH = 7, 48


@cache
def _drawn(normed: bool) -> nn.Module:
    torch.manual_seed(0)
    made = diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=80,
        num_layers=3,
        cross_attn_norm=normed,
        rope_max_seq_len=32,
    )
    return filled(made)  # type: ignore[no-any-return]


def model(dtype: torch.dtype = torch.bfloat16, normed: bool = True) -> Any:
    """As from_pretrained loads it: tables, norms without heads and the rotary embedding stay
    float32.
    """
    diffusers.utils.logging.set_verbosity_error()
    made: Any = copy.deepcopy(_drawn(normed))
    for name, module in made.named_modules():
        if "rope" in name or name.endswith(("norm1", "norm2", "norm3", "time_embedder")):
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if key != "scale_shift_table":
                parameter.data = parameter.data.to(dtype)
    return made


def step(transformer: Any, turn: int = 1, **more: Any) -> torch.Tensor:
    """On two videos of three frames that are not square, of two prompts of seven words."""
    generator, dtype = torch.Generator().manual_seed(turn), transformer.patch_embedding.weight.dtype
    x, words = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((2, 4, 3, 10, 6), (2, WORDS, 32))
    )
    given = {"timestep": torch.tensor([500, 20]), **more}
    with torch.no_grad():
        made: torch.Tensor = transformer(x, encoder_hidden_states=words, **given).sample
    return made.clone()


def fused(transformer: Any) -> None:
    for module in transformer.modules():
        if hasattr(module, "fuse_projections"):
            module.fuse_projections()


@pytest.mark.parametrize("way", ["", "fused", "without a norm"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_blocks_are_ours_as_exact_as_the_hosts_and_given_back(dtype: torch.dtype, way: str) -> None:
    def check(taken: UnetTakeover) -> None:
        (row,) = taken.report()
        assert (row.kind, row.ours, row.total, row.left) == ("transformer block", 3, 3, {})

    change = fused if way == "fused" else lambda transformer: None
    check_blocks(model(dtype, way != "without a norm"), step, check, change)


def test_a_recorded_step_is_the_launched_one(monkeypatch: pytest.MonkeyPatch) -> None:
    desk, _ = check_recorded(model(), step, monkeypatch)
    assert desk.recorded == 3 and desk.replayed == 9


def test_time_embeddings_of_each_token_are_the_hosts_and_said() -> None:
    transformer = model()
    each = torch.full((2, 45), 500)
    hosts = step(transformer, timestep=each)
    taken = taken_over(transformer)
    assert torch.equal(step(transformer, timestep=each), hosts)
    (row,) = taken.report()
    assert row.left == {"its tokens have time embeddings of their own": 3}


def test_a_rotary_embedding_of_unlike_pairs_is_read_as_the_host_does() -> None:
    transformer = model()
    (x, context), rows = torch.randn(2, 2, 7, WIDTH).bfloat16(), torch.randn(2, 6, WIDTH)
    rotary = tuple(torch.randn(2, 1, 7, 1, 24))
    block = transformer.blocks[0]
    hosts = block(x, context, rows, rotary)
    taken_over(transformer)
    ours = block(x, context, rows, rotary)
    assert 0 < (ours - hosts).abs().max() < 0.1


def test_tensors_that_do_not_go_together_are_the_hosts_and_said() -> None:
    transformer = model()
    (x, context), rows = torch.randn(2, 2, 7, WIDTH).bfloat16(), torch.randn(2, 6, WIDTH)
    taken = taken_over(transformer)
    block, reasons = transformer.blocks[0], []
    for given in ((context, rows[:1]), (context[:1], rows)):
        block(x, *given, None)
        reasons += [why.split(": ")[1] for row in taken.report() for why in row.left]
    block(x, context, rows, None)
    assert [row.left for row in taken.report()] == [{}]
    assert [why.split(" torch")[0] for why in reasons] == ["x (2, 7, 48)"] * 2


def test_what_fails_before_the_block_is_the_hosts_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as no memory for the rows that modulate."""

    def fails(*given: Any) -> None:
        raise torch.OutOfMemoryError("too much")

    transformer = model()
    hosts = step(transformer)
    taken = taken_over(transformer)
    monkeypatch.setattr(crossed, "_rows_of", fails)
    assert torch.equal(step(transformer), hosts)
    (row,) = taken.report()
    assert row.left == {"ours failed: OutOfMemoryError: too much": 3}


def test_what_was_changed_is_the_hosts_and_says_why() -> None:
    transformer = model()
    taken = taken_over(transformer)
    step(transformer)
    first, second, third = transformer.blocks
    first.attn2.norm_k.eps = 1e-3
    second.norm2 = nn.RMSNorm(WIDTH)
    third.attn1.set_processor(type("Mine", (type(third.attn1.processor),), {})())
    (row,) = taken.report()
    assert row.ours == 0 and [why.split(" of ")[0] for why in row.left] == [
        "attn2: its norm_q and norm_k are unlike",
        "norm2 is a RMSNorm, not a LayerNorm",
        "attn.processor is a Mine",
    ]
