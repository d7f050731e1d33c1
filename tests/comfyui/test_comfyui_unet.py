"""UNet blocks: ours in the calls of one clone, ComfyUI's to the bit in all others."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lib_rocm_sd import report
from lib_rocm_sd.hosts.comfyui import status
from lib_rocm_sd.hosts.comfyui import unet as ours
from lib_rocm_sd.hosts.comfyui.host import tally
from lib_rocm_sd.hosts.comfyui.model import optimized
from lib_rocm_sd.unet import compute
from lib_rocm_sd.unet.takeover import take_over
from tests.comfyui.conftest import left
from tests.comfyui.unet_steps import (
    TOTALS,
    counts,
    forwards,
    model_of,
    near,
    step,
    strides,
    with_ours,
)
from tests.graph_tape import recording_cpu
from tests.unet.unet_models import draw, errors, fill


@pytest.mark.parametrize("linear", [False, True], ids=["by convolutions", "by linear layers"])
def test_all_blocks_are_ours_in_the_clone_alone(comfy: Any, blocks: None, linear: bool) -> None:
    model = model_of(comfy, linear=linear)
    theirs, before = step(model), strides(model)
    clone = with_ours(model)
    assert model.model_options == {"transformer_options": {}}
    for _ in range(2):
        assert near(step(clone), theirs)
        assert counts() == TOTALS and tally.ours.pop("UNet") == 1
        assert strides(model) != before
        assert torch.equal(step(model), theirs)
        assert strides(model) == before and not forwards(model)
    assert not tally.left
    assert counts() == TOTALS  # as they were last


def test_a_clone_of_the_clone_has_it_until_it_is_off(model: Any, blocks: None) -> None:
    theirs, clone = step(model), with_ours(model).clone()
    clone.model_options["transformer_options"]["wrappers"]["apply_model"]["others"] = [calls_on]
    assert near(step(clone), theirs)
    off = optimized(clone, "Auto", attention=True)
    (names,) = off.model_options["transformer_options"]["wrappers"].values()
    assert list(names) == ["others"] and torch.equal(step(off), theirs)


def calls_on(executor: Any, *args: Any, **kwargs: Any) -> Any:
    return executor(*args, **kwargs)


def test_another_level_takes_over_anew(model: Any, blocks: None) -> None:
    step(with_ours(model))
    first = ours._known[model.model.diffusion_model]._taken
    step(with_ours(model, "Memory"))
    second = ours._known[model.model.diffusion_model]._taken
    assert first is not None and second is not None and not first.is_on
    assert second._session.level == "Memory" and counts() == TOTALS


def test_two_models_do_not_know_each_other(comfy: Any, blocks: None) -> None:
    one, other = model_of(comfy), model_of(comfy)
    theirs = step(other)
    clone = with_ours(one)
    step(clone)
    assert torch.equal(step(other), theirs) and forwards(one)


def test_a_call_of_another_thread_meanwhile_is_comfyuis(model: Any, blocks: None) -> None:
    """It has our blocks and the strides of their weights under its feet, and asks none of them."""
    theirs, made = step(model), []

    def amid(executor: Any, *args: Any, **kwargs: Any) -> Any:
        plain = threading.Thread(target=lambda: made.append(step(model)))
        plain.start()
        plain.join()
        return executor(*args, **kwargs)

    clone = with_ours(model)
    mine = step(clone)
    wrappers = clone.model_options["transformer_options"]["wrappers"]["apply_model"]
    wrappers["amid"] = [amid]
    assert torch.equal(step(clone), mine) and errors(made[0], theirs)[0] < 0.04
    assert tally.ours["UNet"] == 2 and torch.equal(step(model), theirs)


def test_a_model_that_is_gone_is_not_kept(comfy: Any, blocks: None) -> None:
    model = model_of(comfy)
    step(with_ours(model))
    kept = weakref.ref(model.model.diffusion_model)
    del model
    gc.collect()
    assert kept() is None


# --- what comes with a call


def patched(model: Any, **patches: Callable[..., Any]) -> Any:
    made = model.clone()
    named = {name: [patch] for name, patch in patches.items()}
    made.model_options["transformer_options"]["patches"] = named
    return made


PATCHES: dict[str, Callable[..., Any]] = {
    "attn1_patch": lambda n, context, value, options: (n, context, 4 * value),
    "middle_patch": lambda x, options: 2 * x,
    "attn2_output_patch": lambda n, options: 2 * n,
}


@pytest.mark.parametrize("name", PATCHES)
def test_blocks_that_are_patched_within_are_comfyuis(model: Any, blocks: None, name: str) -> None:
    own, changed = step(model), patched(model, **{name: PATCHES[name]})
    theirs = step(changed)
    assert near(step(with_ours(changed)), theirs) and not near(theirs, own)
    assert left() == {f"UNet, transformer blocks: another node changes them ({name})": 1}


@pytest.mark.parametrize("place", [("input", 1), ("input", 1, 1)], ids=["both", "one of two"])
@pytest.mark.parametrize("name", ["attn1", "attn2"])
def test_a_replaced_attention_is_anothers_amid_our_block(
    model: Any, blocks: None, place: tuple[Any, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As IPAdapter_plus replaces attn2, and perturbed attention attn1."""
    asked: list[Any] = []
    normed: list[str] = []
    layer_norm = compute.layer_norm

    def replaced(q: Any, k: Any, v: Any, options: Any) -> Any:
        asked.append((options["block_index"], options["n_heads"], options["dim_head"]))
        assert "patches_replace" not in options
        return 2 * q + (v if name == "attn1" else v.mean(1, keepdim=True))

    def counted(calls: Any, place: str, *args: Any, **how: Any) -> Any:
        normed.append(place)
        return layer_norm(calls, place, *args, **how)

    monkeypatch.setattr(compute, "layer_norm", counted)
    plain = step(with_ours(model))
    in_plain, changed = len(normed), model.clone()
    options = changed.model_options["transformer_options"]
    options["patches_replace"] = {name: {place: replaced}}
    theirs = step(changed)
    count = len(asked)
    assert near(step(with_ours(changed)), theirs) and asked[count:] == asked[:count] != []
    assert len(normed) == 2 * in_plain and not near(theirs, plain)
    why = f"another node replaces it in some of them ({name})"
    assert left() == {f"UNet, transformer blocks' attention: {why}": 1}
    rows = ours.rows()
    partly = [row.partly for row in rows if row.kind == "transformer block"]
    assert partly == [{f"{name} is replaced in this layer": 2 if len(place) == 2 else 1}]


def test_what_comes_between_blocks_works(model: Any, blocks: None) -> None:
    def halves(h: torch.Tensor, other: torch.Tensor, options: Any) -> Any:
        h[:, : h.shape[1] // 2] *= 1.5
        return h, other * 0.5

    changed, control = patched(model, output_block_patch=halves), [0.5, 0.25, 1.0]
    theirs = step(changed, control=control)
    assert near(step(with_ours(changed), control=control), theirs)
    assert counts() == TOTALS and not tally.left


@pytest.mark.parametrize("size", [(8, 10), (6, 7)])
def test_pictures_of_odd_sizes(model: Any, blocks: None, size: tuple[int, int]) -> None:
    x = draw(1, 4, *size)
    assert near(step(with_ours(model), x), step(model, x))


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of attention in blocks that are ours."""
    asked: list[Any] = []
    attention = compute.attention

    def counted(*args: Any) -> Any:
        asked.append(args)
        return attention(*args)

    monkeypatch.setattr(compute, "attention", counted)
    return asked


def test_attention_in_blocks_is_ours_where_the_node_says_so(
    model: Any, blocks: None, attended: list[Any]
) -> None:
    theirs = step(model)
    assert near(step(with_ours(model)), theirs) and not attended
    assert near(step(optimized(model, "Auto", attention=True, unet=True)), theirs)
    assert len(attended) == 8


def test_attention_that_a_checkpoint_prefers_is_ours_too(
    comfy: Any, blocks: None, attended: list[Any]
) -> None:
    """ComfyUI 0.38: the preferred function is asked only where a model has no override."""
    comfy.attention._newer[0] = True
    model = model_of(comfy)
    theirs, preferred = step(model), []

    def function(*args: Any, **kwargs: Any) -> Any:
        preferred.append(args)
        return comfy.attention.attention_pytorch(*args, **kwargs)

    for module in model.model.modules():
        if type(module) is comfy.attention.ComfyAttention:
            module.function = function
    assert near(step(optimized(model, "Auto", attention=True, unet=True)), theirs)
    assert len(attended) == 8 and not preferred and counts() == TOTALS
    assert near(step(with_ours(model)), theirs)
    assert len(attended) == len(preferred) == 8
    assert torch.equal(step(model), theirs)


def test_an_unknown_child_of_attention_is_not_passed_over(
    comfy: Any, blocks: None, attended: list[Any]
) -> None:
    model = model_of(comfy)
    for module in model.model.modules():
        if type(module) is comfy.attention.CrossAttention:
            module.comfy_attention = torch.nn.Identity()
    theirs = step(model)
    assert near(step(optimized(model, "Auto", attention=True, unet=True)), theirs)
    assert not attended and "has a comfy_attention" in str(ours.rows())


def test_time_embeddings_are_made_together_and_anew_in_each_step(
    model: Any, blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    joint: list[int] = []
    linear = compute.linear

    def counted(calls: Any, place: str, x: Any, *layers: Any, **kwargs: Any) -> Any:
        joint.append(len(layers))
        return linear(calls, place, x, *layers, **kwargs)

    monkeypatch.setattr(compute, "linear", counted)
    clone = with_ours(model)
    for _ in range(2):
        joint.clear()
        step(clone)
        assert joint[0] == 5


# --- when it steps aside


def test_without_a_card_it_is_comfyuis_to_the_bit(model: Any) -> None:
    theirs = step(model)
    assert torch.equal(step(with_ours(model)), theirs) and not forwards(model)
    assert left() == {"UNet: no GPU: this is the CPU": 1}


def test_what_is_no_unet_is_left(comfy: Any, blocks: None) -> None:
    model = comfy.patcher.ModelPatcher(
        comfy.base.BaseModel({"query_dim": 32, "heads": 4, "dim_head": 8}), None, None
    )
    clone = with_ours(model)
    clone.model.apply_model(draw(1, 9, 32), None, **clone.model_options)
    why = "this model is CrossAttention of comfy.ldm.modules.attention, not a UNet"
    assert left() == {f"UNet: {why}": 1}


def test_a_compiled_model_is_left(model: Any, blocks: None) -> None:
    theirs, clone = step(model), with_ours(model)
    wrappers = clone.model_options["transformer_options"]["wrappers"]["apply_model"]
    wrappers["torch.compile"] = [calls_on]
    assert torch.equal(step(clone), theirs)
    assert left() == {"UNet: torch.compile computes this model": 1}


def test_a_comfyui_without_wrappers_says_so(comfy: Any, model: Any) -> None:
    del comfy.extension.WrappersMP.APPLY_MODEL
    assert with_ours(model).model_options == {"transformer_options": {}}
    assert left() == {"UNet: this ComfyUI has no wrappers around a model's call": 1}


@pytest.mark.parametrize("where", ["begin", "take_over"])
def test_an_error_of_ours_costs_no_picture(
    model: Any, blocks: None, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, owner = step(model), ours.Blocks if where == "begin" else ours.UnetTakeover
    monkeypatch.setattr(owner, where, lambda *args, **kwargs: 1 // 0)
    assert torch.equal(step(with_ours(model)), theirs)
    assert "UNet: ours failed: ZeroDivisionError" in next(iter(left()))


@pytest.mark.parametrize(
    ("error", "stays"), [(MemoryError("no memory"), True), (RuntimeError("launch failed"), False)]
)
def test_a_block_at_which_ours_fails_is_comfyuis(
    model: Any, blocks: None, error: Exception, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory, it is asked again in the next call."""
    theirs, clone, conv = step(model), with_ours(model), compute.conv

    def fails(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(compute, "conv", fails)
    assert near(step(clone), theirs)
    said = "ours ran out of memory" if stays else "ours failed: RuntimeError: launch failed"
    assert said in "\n".join(report.snapshot()["events"])
    monkeypatch.setattr(compute, "conv", conv)
    step(clone)
    assert (counts()["residual block"] == 5) is stays


def test_what_failed_is_tried_again_in_the_next_run(
    model: Any, blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone, sigmas = with_ours(model), [torch.ones(2), torch.ones(2)]
    options = clone.model_options["transformer_options"]
    options["sample_sigmas"] = sigmas[0]
    with monkeypatch.context() as patch:
        patch.setattr(compute, "conv", lambda *args, **kwargs: 1 // 0)
        step(clone)
    step(clone)
    assert counts()["residual block"] == 0
    options["sample_sigmas"] = sigmas[1]
    step(clone)
    assert counts() == TOTALS


def test_the_status_tells_of_blocks(model: Any, blocks: None) -> None:
    step(with_ours(model))
    said = status.text()
    assert "UNet, residual blocks: 5 of 5 are ours" in said and "UNet: 1 of 1 call ours" in said


def test_blocks_over_frames_are_ours(comfy: Any) -> None:
    """Of Stable Video Diffusion: they begin with a feed-forward, and share no prompt."""
    made = comfy.attention.BasicTransformerBlock(32, 2, 16, context_dim=48, ff_in=True)
    block = fill(made).to(torch.bfloat16)
    transformer = comfy.attention.SpatialTransformer(32, 2, 16, context_dim=48).to(torch.bfloat16)
    transformer.time_stack = torch.nn.ModuleList([block])
    x, context = (draw(35, n, c, seed=n).to(torch.bfloat16) for n, c in ((3, 32), (2, 48)))
    exact = copy.deepcopy(block).double()(x.double(), context.double())
    with torch.no_grad():
        theirs, before = block(x, context), x.clone()
        taken = take_over(transformer)
        result = block(x, context)
        rows = {row.kind: (row.ours, row.total) for row in taken.report()}
        assert rows["transformer block"] == (2, 2) and torch.equal(x, before)
        assert errors(result, exact)[0] <= 2 * errors(theirs, exact)[0]
        assert not torch.equal(result, theirs)
        taken.give_back()
        assert torch.equal(block(x, context), theirs)


def test_residual_blocks_over_frames_are_ours(comfy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their two halves are recorded each for itself; how they mix is float32."""
    video = {"video_kernel_size": [3, 1, 1], "merge_strategy": "learned_with_images"}
    block: Any = fill(comfy.unet.VideoResBlock(96, 64, 0.0, out_channels=32, **video))
    block.to(torch.bfloat16).time_mixer.float()
    model = torch.nn.ModuleList([block])
    x, emb = draw(6, 96, 5, 7).to(torch.bfloat16), draw(6, 64, seed=2).to(torch.bfloat16)
    still = torch.tensor([[0.0, 0, 0], [0, 1, 0]])
    with torch.no_grad():
        exact = copy.deepcopy(block).double()(x.double(), emb.double(), 3, still)
        theirs = block(x, emb, 3, still)
        taken = take_over(model)
        launched = [block(x + n, emb, 3, still).clone() for n in range(4)]
        assert [str(row) for row in taken.report()] == ["residual block over frames: 1 of 1"]
        assert errors(launched[0], exact)[0] <= 2 * errors(theirs, exact)[0]
        taken.give_back()
        desk = recording_cpu(monkeypatch, baked=True)
        taken = take_over(model)
        made = [block(x + n, emb, 3, still).clone() for n in range(4)]
        assert all(map(torch.equal, made, launched)) and desk.recorded and desk.replayed
        assert errors(block(x, emb, 3), exact)[0] > 0.05  # no frame stands still
        block.time_stack.exchange_temb_dims = False
        assert "exchange_temb_dims is False" in str(taken.report()[0])
        block.time_stack.exchange_temb_dims = True
        taken.give_back()
        assert torch.equal(block(x, emb, 3, still), theirs)
