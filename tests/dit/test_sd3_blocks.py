"""SD 3's and SD 3.5's blocks in a real diffusers transformer: ours, right, compared, given back."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.dit import program
from lib_rocm_sd.modules import compared
from lib_rocm_sd.unet import stand_in
from lib_rocm_sd.unet.takeover import UnetTakeover
from tests.dit.any_transformer import (
    check_blocks,
    check_recorded,
    copied,
    filled,
    ours_within_patched,
    taken_over,
)

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

from diffusers.models.attention_processor import JointAttnProcessor2_0

TITLE = "joint transformer block"
KINDS: dict[str, dict[str, Any]] = {
    "SD 3": {},
    "SD 3.5": {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)},
}
HALVES = [torch.float16, torch.bfloat16]


@cache
def _drawn(kind: str) -> nn.Module:
    torch.manual_seed(0)
    made = diffusers.SD3Transformer2DModel(
        sample_size=16,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=32,
        pos_embed_max_size=16,
        **KINDS[kind],
    )
    return filled(made)  # type: ignore[no-any-return]


def model(kind: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    return copied(_drawn(kind), dtype)


def step(transformer: Any, turn: int = 1, rows: int = 16) -> torch.Tensor:
    """On a picture that is not square, of two prompts of seven words."""
    generator = torch.Generator().manual_seed(turn)
    dtype = transformer.dtype
    x, words, pooled = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((2, 16, rows, 12), (2, 7, 32), (2, 32))
    )
    with torch.no_grad():
        made: torch.Tensor = transformer(x, words, pooled, torch.tensor([500.0, 20.0])).sample
    return made.clone()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_ours_as_exact_as_the_hosts_and_given_back(
    kind: str, dtype: torch.dtype
) -> None:
    transformer = model(kind, dtype)

    def check(taken: UnetTakeover) -> None:
        (row,) = taken.report()
        assert (row.kind, row.ours, row.total, row.partly) == (TITLE, 3, 3, {})

    check_blocks(transformer, step, check)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_step_is_the_launched_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = model(kind)
    desk, taken = check_recorded(transformer, step, monkeypatch)
    assert desk.recorded == 3 and desk.replayed == 9
    assert [each.why for each in taken.graphs.known()] == [""]


def test_another_size_of_picture_is_another_program() -> None:
    transformer = model("SD 3.5")
    hosts = [step(transformer, 1, rows) for rows in (16, 8, 16)]
    taken_over(transformer)
    for rows, expected in zip((16, 8, 16), hosts, strict=True):
        torch.testing.assert_close(step(transformer, 1, rows), expected, atol=0.03, rtol=0.1)


@pytest.mark.parametrize("stream", ["picture", "prompt"])
def test_both_streams_are_compared_with_the_hosts(
    stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(compared.VARIABLE, raising=False)
    transformer, right = model("SD 3.5"), program._fed
    taken = taken_over(transformer)
    for turn in (0, 1, 2):  # the last block has no prompt to give
        taken.generation_begins(turn, steps=1)
        step(transformer)
    taken.spot.look(wait=True)
    assert taken.spot.compared == 3 and not taken.spot.left

    def wrong(calls: Any, place: str, *given: Any) -> Any:
        x, gate, h = right(calls, place, *given)
        return (x * 1.5 if (place == "x") is (stream == "picture") else x), gate, h

    monkeypatch.setattr(program, "_fed", wrong)
    taken.generation_begins(0, steps=1)
    step(transformer)
    taken.spot.look(wait=True)
    assert "from the host's own" in taken.spot.left[TITLE]


def test_blocks_are_the_hosts_while_a_kernel_of_ours_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a card: what torch does in its stead is slower than the host's own block."""
    transformer = model("SD 3.5")
    theirs = step(transformer)
    taken = taken_over(transformer)
    monkeypatch.setattr(stand_in, "identify", lambda device: SimpleNamespace(arch=object()))
    assert not torch.equal(step(transformer), theirs)
    assert torch.equal(step(transformer), theirs)
    (row,) = taken.report()
    assert row.ours == 0 and "no modulated norm of ours" in next(iter(row.left))


def chunked(block: Any) -> None:
    block.set_chunk_feed_forward(1, 1)


def processed(block: Any) -> None:
    block.attn.set_processor(type("Mine", (JointAttnProcessor2_0,), {})())


def hooked(block: Any) -> None:
    block.ff.register_forward_hook(lambda *given: None)


def activated(block: Any) -> None:
    block.ff.net[0].approximate = "none"


def weighted(block: Any) -> None:
    block.norm2 = nn.LayerNorm(64).to(torch.bfloat16)


def other_eps(block: Any) -> None:
    block.attn.norm_k.eps = 1e-3


CHANGES: dict[Any, str] = {
    chunked: "block._chunk_size is 1",
    processed: "attn.processor is a Mine",
    hooked: "ff has forward hooks",
    activated: "ff.net.0.approximate is none",
    weighted: "norm2 has a weight",
    other_eps: "norm_q and norm_k are unlike",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_block_that_was_changed_is_the_hosts_and_says_why(change: Any) -> None:
    """Also amid pictures: what was read is looked at before each call."""
    transformer = model("SD 3.5")
    taken = taken_over(transformer)
    step(transformer)
    change(transformer.transformer_blocks[1])
    mine = step(transformer)
    (row,) = taken.report()
    assert row.ours == 2
    (why,) = row.left
    assert CHANGES[change] in why
    taken.give_back()
    torch.testing.assert_close(mine, step(transformer), atol=0.03, rtol=0.1)


def test_further_arguments_of_attention_are_the_hosts() -> None:
    transformer = model("SD 3")
    taken = taken_over(transformer)
    block = transformer.transformer_blocks[0]
    x, words, time = (torch.zeros(shape).bfloat16() for shape in ((1, 4, 64), (1, 2, 64), (1, 64)))
    block(x, words, time, {"attention_mask": None})
    (row,) = taken.report()
    assert row.left == {"attention is given attention_mask": 1}
    step(transformer)
    assert taken.report()[0].ours == 3


def test_patched_takes_a_pipelines_transformer_over() -> None:
    assert ours_within_patched(model("SD 3.5")) == {TITLE: 3}
    assert ours_within_patched(nn.Linear(2, 2)) == {}
