"""UNet blocks: ours in the calls of one clone, ComfyUI's to the bit in all others."""

from __future__ import annotations

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
from lib_rocm_sd.hosts.comfyui.model import optimized
from lib_rocm_sd.hosts.comfyui.tally import tally
from lib_rocm_sd.unet import compute
from tests.comfyui.conftest import left
from tests.unet.unet_models import draw, errors

BF16 = torch.bfloat16
SIGMAS = torch.ones(2)
"""By which a run of a sampler is known."""
X, TIMES, CONTEXT = draw(2, 4, 8, 8), torch.tensor([500.0, 500.0]), draw(2, 7, 48).to(BF16)
TOTALS = {
    "residual block": 5,
    "transformer": 2,
    "transformer block": 4,
    "upsampling": 1,
    "downsampling": 1,
    "first and last layers": 2,
}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU may compute blocks, by torch's own operations."""
    monkeypatch.setattr(ours, "unusable", lambda device: [])


@pytest.fixture
def model(comfy: Any) -> Any:
    return model_of(comfy)


def model_of(comfy: Any, **config: Any) -> Any:
    """As a loader node makes one: amid inference mode, and in training mode."""
    torch.manual_seed(0)
    with torch.inference_mode():
        kind = comfy.unet.UNetModel
        base = comfy.base.BaseModel({"dtype": BF16, **config}, unet_model=kind)
        for parameter in base.parameters():
            parameter.requires_grad_(False)
    assert base.training and next(base.parameters()).is_inference()
    return comfy.patcher.ModelPatcher(base, None, None)


def with_ours(model: Any, level: str = "Auto") -> Any:
    return optimized(model, level, attention=False, unet=True)


@torch.inference_mode()
def step(model: Any, x: torch.Tensor = X, **given: Any) -> torch.Tensor:
    """A step of a sampler: the model's weights as its patches say, its options in a copy."""
    if model.model.current_patcher is not model:
        model.patch_model()
    model.model.current_patcher = model
    options = {"sample_sigmas": SIGMAS, **model.model_options["transformer_options"]}
    context = CONTEXT[: x.shape[0]]
    made: torch.Tensor = model.model.apply_model(
        x, TIMES[: x.shape[0]], c_crossattn=context, transformer_options=options, **given
    )
    return made


def near(made: torch.Tensor, theirs: torch.Tensor) -> bool:
    return errors(made, theirs)[0] < 0.04 and not torch.equal(made, theirs)


def counts() -> dict[str, int]:
    return {row.kind: row.ours for row in ours.rows()}


def strides(model: Any) -> list[tuple[int, ...]]:
    return [parameter.stride() for parameter in model.model.parameters()]


def forwards(model: Any) -> list[Any]:
    return [module for module in model.model.modules() if "forward" in vars(module)]


@pytest.mark.parametrize("linear", [False, True], ids=["by convolutions", "by linear layers"])
def test_all_blocks_are_ours_in_the_clone_alone(comfy: Any, card: None, linear: bool) -> None:
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


def test_a_clone_of_the_clone_has_it_until_it_is_off(model: Any, card: None) -> None:
    theirs, clone = step(model), with_ours(model).clone()
    clone.model_options["transformer_options"]["wrappers"]["apply_model"]["others"] = [calls_on]
    assert near(step(clone), theirs)
    off = optimized(clone, "Auto", attention=True)
    (names,) = off.model_options["transformer_options"]["wrappers"].values()
    assert list(names) == ["others"] and torch.equal(step(off), theirs)


def calls_on(executor: Any, *args: Any, **kwargs: Any) -> Any:
    return executor(*args, **kwargs)


def test_another_level_takes_over_anew(model: Any, card: None) -> None:
    step(with_ours(model))
    first = ours._known[model.model.diffusion_model]._taken
    step(with_ours(model, "Memory"))
    second = ours._known[model.model.diffusion_model]._taken
    assert first is not None and second is not None and not first.is_on
    assert second._session.level == "Memory" and counts() == TOTALS


def test_two_models_do_not_know_each_other(comfy: Any, card: None) -> None:
    one, other = model_of(comfy), model_of(comfy)
    theirs = step(other)
    clone = with_ours(one)
    step(clone)
    assert torch.equal(step(other), theirs) and forwards(one)


def test_a_call_of_another_thread_meanwhile_is_comfyuis(model: Any, card: None) -> None:
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


def test_a_model_that_is_gone_is_not_kept(comfy: Any, card: None) -> None:
    model = model_of(comfy)
    step(with_ours(model))
    kept = weakref.ref(model.model.diffusion_model)
    del model
    gc.collect()
    assert kept() is None


# --- weights


def lora(model: Any, seed: int = 1) -> dict[str, torch.Tensor]:
    """For every weight and bias of a layer in a block."""
    named = model.model.named_parameters()
    return {
        key: 0.1 * draw(*p.shape, seed=seed + n)
        for n, (key, p) in enumerate(named)
        if "blocks" in key and "norm" not in key
    }


def test_a_lora_in_the_weights_is_heeded(model: Any, card: None) -> None:
    theirs, added = step(model), model.clone()
    added.add_patches(lora(model))
    other = step(added)
    assert not near(other, theirs)
    for one, expected in ((model, theirs), (added, other), (model, theirs)):
        assert near(step(with_ours(one)), expected)


def test_weights_that_were_put_aside_lie_as_before_too(model: Any, card: None) -> None:
    """ComfyUI puts a LoRA's backup back when nothing of ours is there any more."""
    theirs, before, added = step(model), strides(model), model.clone()
    added.add_patches(lora(model))
    other = step(added)
    step(with_ours(model))
    clone = with_ours(added)
    step(clone)
    assert torch.equal(step(added), other)
    assert torch.equal(step(model), theirs) and strides(model) == before


def test_values_that_changed_in_place_are_read(model: Any, card: None) -> None:
    """As ComfyUI's hooks of weights do it: it says so by its hooks, or by its patches' name."""
    clone, block = with_ours(model), model.model.diffusion_model.middle_block[0]
    step(clone)
    for change in ("hooks", "uuid"):
        with torch.inference_mode():
            for layer in (block.out_layers[3], block.emb_layers[1]):
                layer.bias.data.add_(8 * draw(*layer.bias.shape))
        if change == "hooks":
            clone.current_hooks = object()
        else:
            clone.current_hooks, model.model.current_weight_patches_uuid = None, object()
        made = step(clone)
        fresh = step(model)
        assert near(made, fresh), change
        step(clone)


def test_layers_that_bring_their_weights_are_comfyuis(model: Any, card: None) -> None:
    theirs, clone = step(model), with_ours(model)
    block = model.model.diffusion_model.middle_block[0]
    step(clone)
    conv = block.in_layers[2]
    conv.prev_comfy_cast_weights, conv.comfy_cast_weights = False, True
    assert near(step(clone), theirs) and counts()["residual block"] == 4
    assert "brings its weights from elsewhere in each call" in str(ours.rows()[0])
    conv.comfy_cast_weights = conv.prev_comfy_cast_weights
    del conv.prev_comfy_cast_weights
    step(clone)
    assert counts() == TOTALS
    conv.weight_function = []
    step(clone)
    conv.weight_function.append(lambda weight: 2 * weight)
    doubled = step(clone)
    assert counts()["residual block"] == 4
    assert near(doubled, step(model)) and not near(doubled, theirs)


def test_casting_layers_are_comfyuis(comfy: Any, card: None) -> None:
    model = model_of(comfy, operations=comfy.ops.manual_cast)
    theirs = step(model)
    assert torch.equal(step(with_ours(model)), theirs)
    assert set(counts().values()) == {0}
    assert all("brings its weights from elsewhere" in str(row) for row in ours.rows())


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
def test_blocks_that_are_patched_within_are_comfyuis(model: Any, card: None, name: str) -> None:
    own, changed = step(model), patched(model, **{name: PATCHES[name]})
    theirs = step(changed)
    assert near(step(with_ours(changed)), theirs) and not near(theirs, own)
    assert left() == {f"UNet, transformer blocks: {name} of this model": 1}


@pytest.mark.parametrize("place", [("input", 1), ("input", 1, 1)], ids=["both", "one of two"])
def test_a_replaced_attention_is_anothers(model: Any, card: None, place: tuple[Any, ...]) -> None:
    asked: list[Any] = []

    def replaced(q: Any, k: Any, v: Any, options: Any) -> Any:
        asked.append(options["block_index"])
        return q

    changed = model.clone()
    options = changed.model_options["transformer_options"]
    options["patches_replace"] = {"attn2": {place: replaced}}
    theirs = step(changed)
    count = len(asked)
    assert near(step(with_ours(changed)), theirs) and asked[count:] == asked[:count]
    assert "attn2 is replaced in this model" in next(iter(left()))


def test_what_comes_between_blocks_works(model: Any, card: None) -> None:
    def halves(h: torch.Tensor, other: torch.Tensor, options: Any) -> Any:
        h[:, : h.shape[1] // 2] *= 1.5
        return h, other * 0.5

    changed, control = patched(model, output_block_patch=halves), [0.5, 0.25, 1.0]
    theirs = step(changed, control=control)
    assert near(step(with_ours(changed), control=control), theirs)
    assert counts() == TOTALS and not tally.left


@pytest.mark.parametrize("size", [(8, 10), (6, 7)])
def test_pictures_of_odd_sizes(model: Any, card: None, size: tuple[int, int]) -> None:
    x = draw(1, 4, *size)
    assert near(step(with_ours(model), x), step(model, x))


def test_attention_in_blocks_is_ours_where_the_node_says_so(
    model: Any, card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    attention = compute.attention

    def counted(*args: Any) -> Any:
        asked.append(args)
        return attention(*args)

    monkeypatch.setattr(compute, "attention", counted)
    theirs = step(model)
    assert near(step(with_ours(model)), theirs) and not asked
    assert near(step(optimized(model, "Auto", attention=True, unet=True)), theirs)
    assert len(asked) == 8


def test_time_embeddings_are_made_together_and_anew_in_each_step(
    model: Any, card: None, monkeypatch: pytest.MonkeyPatch
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
        assert joint[:2] == [3, 2]


# --- when it steps aside


def test_without_a_card_it_is_comfyuis_to_the_bit(model: Any) -> None:
    theirs = step(model)
    assert torch.equal(step(with_ours(model)), theirs) and not forwards(model)
    assert left() == {"UNet: no GPU: this is the CPU": 1}


def test_what_is_no_unet_is_left(comfy: Any, card: None) -> None:
    model = comfy.patcher.ModelPatcher(
        comfy.base.BaseModel({"query_dim": 32, "heads": 4, "dim_head": 8}), None, None
    )
    clone = with_ours(model)
    clone.model.apply_model(draw(1, 9, 32), None, **clone.model_options)
    why = "this model is CrossAttention of comfy.ldm.modules.attention, not a UNet"
    assert left() == {f"UNet: {why}": 1}


def test_a_compiled_model_is_left(model: Any, card: None) -> None:
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
    model: Any, card: None, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, owner = step(model), ours.Blocks if where == "begin" else ours.UnetTakeover
    monkeypatch.setattr(owner, where, lambda *args, **kwargs: 1 // 0)
    assert torch.equal(step(with_ours(model)), theirs)
    assert "UNet: ours failed: ZeroDivisionError" in next(iter(left()))


@pytest.mark.parametrize(
    ("error", "stays"), [(MemoryError("no memory"), True), (RuntimeError("launch failed"), False)]
)
def test_a_block_at_which_ours_fails_is_comfyuis(
    model: Any, card: None, error: Exception, stays: bool, monkeypatch: pytest.MonkeyPatch
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
    model: Any, card: None, monkeypatch: pytest.MonkeyPatch
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


def test_the_status_tells_of_blocks(model: Any, card: None) -> None:
    step(with_ours(model))
    said = status.text()
    assert "UNet, residual blocks: 5 of 5 are ours" in said and "Ours: UNet, 1 call" in said
