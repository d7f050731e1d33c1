"""Flux's blocks in a real diffusers transformer: ours, right, compared, given back."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.dit import program
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.modules import compared
from lib_rocm_sd.report import Report
from lib_rocm_sd.unet.takeover import UnetTakeover, take_over
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


JOINT, SINGLE = "joint transformer block", "single transformer block"
HALVES = [torch.float16, torch.bfloat16]
WORDS, TOKENS, WIDTH = 7, 15, 96


@cache
def _drawn() -> nn.Module:
    torch.manual_seed(0)
    made = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=24,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 8, 12),
    )
    return filled(made)  # type: ignore[no-any-return]


def model(dtype: torch.dtype = torch.bfloat16) -> Any:
    return copied(_drawn(), dtype)


def step(transformer: Any, turn: int = 1, rows: int = 5, **more: Any) -> torch.Tensor:
    """On two pictures that are not square, of two prompts of seven words."""
    generator = torch.Generator().manual_seed(turn)
    dtype = transformer.dtype
    x, words, pooled = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((2, 3 * rows, 16), (2, WORDS, 32), (2, 32))
    )
    places = torch.zeros(rows, 3, 3)
    places[..., 1], places[..., 2] = torch.arange(rows)[:, None], torch.arange(3)
    with torch.no_grad():
        made: torch.Tensor = transformer(
            hidden_states=x,
            encoder_hidden_states=words,
            pooled_projections=pooled,
            timestep=torch.tensor([0.5, 0.02]).to(dtype),
            img_ids=places.flatten(0, 1),
            txt_ids=torch.zeros(WORDS, 3),
            **more,
        ).sample
    return made.clone()


def counts(taken: UnetTakeover) -> dict[str, tuple[int, int]]:
    return {row.kind: (row.ours, row.total) for row in taken.report()}


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_blocks_are_ours_as_exact_as_the_hosts_and_given_back(
    dtype: torch.dtype, fused: bool
) -> None:
    transformer = model(dtype)

    def fuse(transformer: Any) -> None:
        for module in transformer.modules():
            if hasattr(module, "fuse_projections"):
                module.fuse_projections()

    def check(taken: UnetTakeover) -> None:
        assert counts(taken) == {JOINT: (2, 2), SINGLE: (3, 3)}

    check_blocks(transformer, step, check, fuse if fused else lambda transformer: None)


def test_a_recorded_step_is_the_launched_one(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = model()
    desk, taken = check_recorded(transformer, step, monkeypatch)
    assert desk.recorded == 5 and desk.replayed == 15
    assert [each.why for each in taken.graphs.known()] == [""]


def test_another_size_of_picture_is_another_program() -> None:
    transformer = model()
    hosts = [step(transformer, 1, rows) for rows in (5, 2, 5)]
    taken_over(transformer)
    for rows, expected in zip((5, 2, 5), hosts, strict=True):
        torch.testing.assert_close(step(transformer, 1, rows), expected, atol=0.03, rtol=0.1)


def given(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """What a block is given."""
    generator = torch.Generator().manual_seed(3)
    drawn = lambda *shape: torch.randn(shape, generator=generator).to(dtype)  # noqa: E731
    angle = torch.rand((WORDS + TOKENS, 24), generator=generator)
    return {
        "hidden_states": drawn(2, TOKENS, WIDTH),
        "encoder_hidden_states": drawn(2, WORDS, WIDTH),
        "temb": drawn(2, WIDTH),
        "image_rotary_emb": (angle.cos(), angle.sin()),
    }


@pytest.mark.parametrize(
    ("place", "gates", "last"),
    [
        ("transformer_blocks.0", "norm1_context.linear", "ff_context.net.2"),
        ("single_transformer_blocks.1", "norm.linear", "proj_out"),
    ],
)
def test_what_overflows_is_clipped_as_the_host_does(place: str, gates: str, last: str) -> None:
    block = model(torch.float16).get_submodule(place)
    block.get_submodule(gates).bias += 4.0
    block.get_submodule(last).bias += 1000.0
    inputs = given(torch.float16)
    inputs["encoder_hidden_states"] = 63000 * inputs["encoder_hidden_states"].sign()
    theirs = block(**inputs)
    taken = take_over(nn.ModuleList([block]), Session.of("Auto", report=Report()))
    ours = block(**inputs)
    assert sum(row.ours for row in taken.report()) == 1
    assert theirs[0].abs().max() == 65504
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, right, atol=64, rtol=0.01, equal_nan=True)


@pytest.mark.parametrize("kind", [JOINT, SINGLE])
def test_blocks_are_compared_with_the_hosts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(compared.VARIABLE, raising=False)
    transformer, right = model(), program._attended
    taken = taken_over(transformer)
    for turn in (0, 1, 2):
        taken.generation_begins(turn, steps=1)
        step(transformer)
        step(transformer)
    taken.spot.look(wait=True)
    assert taken.spot.compared and not taken.spot.left

    def wrong(calls: Any, place: str, *args: Any, **rotary: Any) -> Any:
        made = right(calls, place, *args, **rotary)
        return made + 5 if (place == "own") is (kind == SINGLE) else made

    monkeypatch.setattr(program, "_attended", wrong)
    taken.generation_begins(0, steps=1)
    step(transformer)
    taken.spot.look(wait=True)
    assert list(taken.spot.left) == [kind]


def processed(double: Any, single: Any) -> None:
    kind = type(double.attn.processor)
    for block in (double, single):
        block.attn.set_processor(type("Mine", (kind,), {})())


def backed(double: Any, single: Any) -> None:
    for block in (double, single):
        block.attn.processor._attention_backend = "sage"


def hooked(double: Any, single: Any) -> None:
    double.ff.register_forward_hook(lambda *given: None)
    single.proj_mlp.register_forward_hook(lambda *given: None)


def activated(double: Any, single: Any) -> None:
    double.ff.net[0].approximate = single.act_mlp.approximate = "none"


def other_eps(double: Any, single: Any) -> None:
    double.attn.norm_added_k.eps = single.attn.norm_k.eps = 1e-3


CHANGES: dict[Any, tuple[str, str]] = {
    processed: ("attn.processor is a Mine",) * 2,
    backed: ("attn.processor._attention_backend is sage",) * 2,
    hooked: ("ff has forward hooks", "proj_mlp has forward hooks"),
    activated: ("ff.net.0.approximate is none", "act_mlp.approximate is none"),
    other_eps: ("norm_added_k are unlike", "norm_k are unlike"),
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_block_that_was_changed_is_the_hosts_and_says_why(change: Any) -> None:
    """Also amid pictures: what was read is looked at before each call."""
    transformer = model()
    taken = taken_over(transformer)
    step(transformer)
    change(transformer.transformer_blocks[1], transformer.single_transformer_blocks[0])
    rows = {row.kind: row for row in taken.report()}
    for kind, why in zip((JOINT, SINGLE), CHANGES[change], strict=True):
        (said,) = rows[kind].left
        assert why in said and rows[kind].ours == rows[kind].total - 1


def test_calls_of_other_forms_are_the_hosts_and_say_why() -> None:
    transformer = model()
    taken = taken_over(transformer)
    double, single = transformer.transformer_blocks[0], transformer.single_transformer_blocks[0]
    said = lambda: [why for row in taken.report() for why in row.left]  # noqa: E731
    inputs = given()
    cos, sin = inputs.pop("image_rotary_emb")
    for block in (double, single):
        block(**inputs, joint_attention_kwargs={"attention_mask": None})
        block(**inputs, image_rotary_emb=(cos.double(), sin.double()))
    assert said() == ["its rotary embedding is float64 on cpu"] * 2
    double(**inputs, joint_attention_kwargs={"attention_mask": None})
    assert said()[0] == "attention is given attention_mask"
    for block in (double, single):
        block(**inputs)
        block(**inputs, image_rotary_emb=(cos, sin), joint_attention_kwargs={})
    assert said() == []


def test_patched_takes_a_pipelines_transformer_over() -> None:
    assert ours_within_patched(model()) == {JOINT: 2, SINGLE: 3}


def test_adapters_of_peft_count_while_they_are_on() -> None:
    layers = ["to_q", "to_out.0", "add_q_proj", "proj_mlp", "proj_out", "ff.net.2", "norm.linear"]
    check_adapters(_drawn(), step, layers)
