"""The UNet's blocks in a Forge: whose they are in pictures with patches, LoRAs and casts."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import FakeGpu
from forge_help import HALF, distance, same
from unet_help import AUTO, WITHOUT, blocks_shown, session_of

NEAR = 0.15
"""Of bfloat16's steps with random weights."""
ONE = pytest.mark.parametrize("forge", ["forge"], indirect=True)
"""Of the kinds one is enough, or has it."""
CAST = {"forge": "parameters_manual_cast", "reforge": "ldm_patched_cast_weights"}


@pytest.fixture(autouse=True)
def norms(gpu: FakeGpu) -> None:
    gpu.norms = True


def patcher_of(webui: Any) -> Any:
    return webui.shared.sd_model.forge_objects.unet


def unet_of(webui: Any) -> Any:
    return patcher_of(webui).model.diffusion_model


def strides_of(webui: Any) -> list[tuple[int, ...]]:
    return [parameter.stride() for parameter in unet_of(webui).parameters()]


def untouched(webui: Any) -> bool:
    unet = unet_of(webui)
    hooks = (*unet._forward_pre_hooks.values(), *unet._forward_hooks.values())
    return not hooks and not any("forward" in vars(module) for module in unet.modules())


def counts(webui: Any) -> dict[str, tuple[int, int]]:
    return {row.kind: (row.ours, row.total) for row in session_of(webui).look()}


def total(webui: Any) -> int:
    return sum(total for _, total in counts(webui).values())


def why(webui: Any, kind: str) -> str:
    return "; ".join(
        reason
        for row in session_of(webui).look()
        if row.kind == kind
        for reason in (*row.left, *row.partly)
    )


def scaled(n: Any, context: Any, value: Any, more: Any) -> Any:
    assert more["n_heads"] and "patches" not in more
    return n * 3, context, value


def nothing(q: Any, k: Any, v: Any, more: Any) -> Any:
    return torch.zeros_like(q)


def test_on_and_off(forge: Any, gpu: FakeGpu) -> None:
    expected = forge(extension=False, whole=True).txt2img()
    webui = forge(gpu=gpu, whole=True)
    assert next(unet_of(webui).parameters()).is_inference()
    before = strides_of(webui)
    assert same(webui.txt2img(False), expected) and untouched(webui)

    on = webui.txt2img(*AUTO)
    blocks = total(webui)
    assert blocks > 10 and f"{blocks} of {blocks} blocks, linear: torch, conv: torch" in on.info
    assert 0 < distance(on, expected) < NEAR and strides_of(webui) != before
    assert same(webui.txt2img(*AUTO), on)
    rows = {row.operation: row for row in blocks_shown(webui)}
    assert not any(row.why for name, row in rows.items() if "launches" not in name)

    attention = webui.txt2img(*WITHOUT)
    assert "ROCm SD UNet: off" in attention.info and untouched(webui)
    assert same(webui.txt2img(False), expected) and strides_of(webui) == before
    assert not webui.errors_reported and not webui.errors.recorded


def wrapped(norm: Any, h: Any, options: Any) -> Any:
    return norm(h) * 0.5


PATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "attn1_patch": ({"patches": {"attn1_patch": [scaled]}}, "attn1_patch of this model"),
    "attn2_patch": ({"patches": {"attn2_patch": [scaled]}}, "attn2_patch of this model"),
    "output": (
        {"patches": {"attn2_output_patch": [lambda n, more: n * 3]}},
        "attn2_output_patch of this model",
    ),
    "replaced": (
        {"patches_replace": {"attn1": {("input", 1, 0): nothing}}},
        "attn1 is replaced in this layer",
    ),
    "between": ({"patches": {"output_block_patch": [lambda h, skip, more: (h * 1.1, skip)]}}, ""),
    "around blocks": ({"block_modifiers": [lambda h, when, options: h * 1.1]}, ""),
    "around layers": ({"block_inner_modifiers": [lambda h, when, *more: h * 1.1]}, ""),
    "norms": ({"group_norm_wrapper": wrapped}, "a group_norm_wrapper is set in this model"),
}
OF_FORGE = ("around blocks", "around layers", "norms")


def test_what_a_patch_asks_for_happens(forge: Any, gpu: FakeGpu) -> None:
    webui = forge(gpu=gpu, whole=True)
    cases = {k: v for k, v in PATCHES.items() if forge.kind == "forge" or k not in OF_FORGE}
    webui.txt2img(*WITHOUT, steps=1)
    plain = step(webui)
    theirs = {name: step(webui, **options) for name, (options, _) in cases.items()}
    webui.txt2img(*AUTO, steps=1)
    for name, (options, reason) in cases.items():
        ours = step(webui, **options)
        assert apart(ours, theirs[name]) < 0.04 < apart(plain, theirs[name]), name
        kind = "residual block" if name == "norms" else "transformer block"
        count, of = counts(webui)[kind]
        assert why(webui, kind) == reason, name
        assert count == (0 if reason and name != "replaced" else of), name
    assert 0 < apart(step(webui), plain) < 0.04 and not why(webui, "transformer block")
    webui.txt2img(False, steps=1)
    assert torch.equal(step(webui), plain)


@torch.inference_mode()
def step(webui: Any, **options: Any) -> torch.Tensor:
    """One of the loaded model's, with these of transformer_options."""
    generator, unet = torch.Generator().manual_seed(1), unet_of(webui)
    x, context = (torch.randn(shape, generator=generator) for shape in ((2, 4, 8, 8), (2, 7, 24)))
    times, given = torch.tensor([500.0, 500.0]), {"context": context.to(HALF)}
    return unet(x.to(HALF), times, **given, transformer_options=options).float()  # type: ignore[no-any-return]


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def lora(webui: Any, online: bool = False) -> None:
    """On a clone, which becomes the model's."""
    clone, generator = patcher_of(webui).clone(), torch.Generator().manual_seed(5)
    changes = {
        name: ("diff", (torch.randn(weight.shape, generator=generator) * 0.1,))
        for name, weight in clone.model.named_parameters()
        if weight.ndim > 1 or name.endswith("bias")
    }
    if hasattr(clone, "refresh_loras"):
        clone.add_patches(filename="a", patches=changes, online_mode=online)
    else:
        clone.add_patches(changes)
    webui.shared.sd_model.forge_objects.unet = clone


LORAS = [("forge", False), ("forge", True), ("reforge", False)]


@pytest.mark.parametrize(("forge", "online"), LORAS, indirect=["forge"])
def test_loras(forge: Any, gpu: FakeGpu, online: bool) -> None:
    webui = forge(gpu=gpu, whole=True)
    before, original = strides_of(webui), patcher_of(webui)
    plain = webui.txt2img(False)
    lora(webui, online)
    expected = webui.txt2img(False)
    assert distance(expected, plain) > 2 * NEAR
    webui.shared.sd_model.forge_objects.unet = original
    on = webui.txt2img(*AUTO)
    lora(webui, online)
    with_lora = webui.txt2img(*AUTO)
    assert distance(with_lora, expected) < NEAR
    left = why(webui, "residual block")
    assert counts(webui)["residual block"][0] == (
        0 if online else counts(webui)["residual block"][1]
    )
    assert ("has its weights changed in each call" in left) is online
    webui.shared.sd_model.forge_objects.unet = original
    assert same(webui.txt2img(*AUTO), on)
    lora(webui, online)
    webui.txt2img(*AUTO)
    assert same(webui.txt2img(False), expected)  # while the LoRA's backup is held
    webui.shared.sd_model.forge_objects.unet = original
    assert same(webui.txt2img(False), plain) and strides_of(webui) == before


def test_layers_that_cast_are_forges(forge: Any, gpu: FakeGpu) -> None:
    """As a Forge leaves those that stay in main memory, and gives them back later."""
    webui = forge(gpu=gpu, whole=True)
    expected = webui.txt2img(*AUTO, steps=1)
    flag, block = CAST[forge.kind], unet_of(webui).middle_block[0]
    for layer in block.modules():
        if hasattr(layer, flag):
            setattr(layer, flag, True)
    webui.txt2img(*AUTO, steps=1)
    ours, of = counts(webui)["residual block"]
    assert ours == of - 1 and "brings its weights from elsewhere" in why(webui, "residual block")
    for layer in block.modules():
        if hasattr(layer, flag):
            setattr(layer, flag, False)
    assert same(webui.txt2img(*AUTO, steps=1), expected) and counts(webui)["residual block"] == (
        of,
        of,
    )


@ONE
def test_weights_in_float8_are_forges(forge: Any, gpu: FakeGpu) -> None:
    storage = {"dtype": torch.float8_e4m3fn, "manual_cast_enabled": True}
    webui = forge(gpu=gpu, whole=storage)
    expected, attention_only = webui.txt2img(False, steps=1), webui.txt2img(*WITHOUT, steps=1)
    on = webui.txt2img(*AUTO, steps=1)
    assert same(on, attention_only) and 0 < distance(on, expected) < NEAR
    assert 'ROCm SD UNet: "Auto, left to the WebUI"' in on.info
    assert 'ROCm SD: "Auto, attention: rocm_sd"' in on.info
    assert all(ours == 0 for ours, _ in counts(webui).values())


@ONE
def test_quantised_weights_keep_their_layers(forge: Any, gpu: FakeGpu) -> None:
    """GGUF: blocks with a packed weight are Forge's, the convolutions between them ours."""
    webui = forge(gpu=gpu, whole={"packed": True})
    expected, on = webui.txt2img(False, steps=1), webui.txt2img(*AUTO, steps=1)
    assert 0 < distance(on, expected) < NEAR and 'attention: rocm_sd"' in on.info
    found = counts(webui)
    assert found["residual block"][0] == 0 and found["upsampling"] == (1, 1)
    assert "emb_layers.1 has quantised weights" in why(webui, "residual block")
    assert "attn1.to_q has quantised weights" in why(webui, "transformer block")
    assert same(webui.txt2img(False, steps=1), expected) and untouched(webui)


@ONE
def test_a_class_that_computes_more_is_forges(forge: Any, gpu: FakeGpu, monkeypatch: Any) -> None:
    """As in forks of it, whose classes have the same names."""
    webui = forge(gpu=gpu, whole=True)
    kind = type(unet_of(webui).middle_block[0])
    owner = next(cls for cls in kind.__mro__ if "_forward" in vars(cls))
    own = owner._forward

    def doubled(self: Any, *args: Any) -> Any:
        return self.scaled(own(self, *args))

    doubled.__module__ = owner.__module__
    monkeypatch.setattr(owner, "_forward", doubled)
    monkeypatch.setattr(kind, "scaled", lambda self, y: y, raising=False)
    webui.txt2img(*AUTO, steps=1)
    assert counts(webui)["residual block"][0] == 0
    assert "ResBlock._forward does more than is known: scaled" in why(webui, "residual block")


@ONE
def test_another_has_replaced_attention_in_blocks(forge: Any, gpu: FakeGpu) -> None:
    webui = forge(gpu=gpu, whole=True)
    webui.txt2img(*AUTO, steps=1)
    attention = next(m for m in unet_of(webui).modules() if type(m).__name__ == "CrossAttention")
    names, seen = type(attention).forward.__globals__, []
    name = next(each for each in forge.names if each in names)
    ours = names[name]

    def other(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return ours(*args, **kwargs)

    names[name] = other
    webui.txt2img(*AUTO, steps=1)
    names[name] = ours
    assert len(seen) == 2 * counts(webui)["transformer block"][1]


@ONE
def test_an_error_before_a_step_costs_no_picture(
    forge: Any, gpu: FakeGpu, monkeypatch: Any
) -> None:
    webui = forge(gpu=gpu, whole=True)
    expected = webui.txt2img(*WITHOUT, steps=1)
    monkeypatch.setattr(webui.library("hosts.webui.unet"), "values_of", lambda model: 1 // 0)
    assert same(webui.txt2img(*AUTO, steps=1), expected) and not webui.errors_reported


def is_ours(webui: Any) -> bool:
    forwards = (vars(module).get("forward") for module in unet_of(webui).modules())
    return any(type(each).__name__ == "BlockStandIn" for each in forwards)


@pytest.fixture
def timed(forge: Any, gpu: FakeGpu, monkeypatch: Any) -> Any:
    """A Forge whose steps take 5.5 ms by its own code and 9.9 ms by ours. One call of a picture
    counts.
    """
    webui = forge(gpu=gpu, whole=True)
    faster = webui.library("modules.faster")

    def started(device: torch.device) -> Any:
        ms = 9.9 if is_ours(webui) else 5.5
        return lambda: lambda: ms

    monkeypatch.delenv("ROCM_SD_COMPARE_SPEED")
    monkeypatch.setattr(faster, "is_compared_on", lambda device: True)
    monkeypatch.setattr(faster, "SETTLING", {True: 1, False: 1})
    monkeypatch.setattr(faster, "TIMED", 1)
    monkeypatch.setattr(faster, "begin", started)
    return webui


@ONE
def test_the_slower_way_is_not_taken(timed: Any) -> None:
    plain, before = timed.txt2img(*WITHOUT), strides_of(timed)
    first, theirs, again, more, decided = (timed.txt2img(*AUTO) for _ in range(5))
    assert same(theirs, plain) and same(more, plain) and same(decided, plain)
    assert same(again, first) and not same(first, plain)
    why = "the WebUI's own code is faster here, 5.5 ms for 9.9"
    assert why in decided.comments and strides_of(timed) == before
    assert session_of(timed).trouble == why
    other = timed.txt2img(*AUTO, width=136)
    assert is_ours(timed) and same(
        timed.txt2img(*AUTO, width=136), timed.txt2img(*WITHOUT, width=136)
    )
    assert same(timed.txt2img(*AUTO, width=136), other)  # ours from its first step on, again
    timed.txt2img(False)
    assert untouched(timed) and not timed.errors_reported


@ONE
def test_each_picture_of_a_batch_is_made_by_one(timed: Any, monkeypatch: Any) -> None:
    """Also where weights may be others in each step."""
    monkeypatch.setattr(timed.library("hosts.webui.unet"), "values_of", lambda model: None)
    made: list[set[bool]] = []
    timed.script_callbacks.on_cfg_denoiser(
        lambda params: made.append(set()) if params.denoiser.step == 0 else None
    )
    unet_of(timed).middle_block.register_forward_hook(lambda *_: made[-1].add(is_ours(timed)))
    timed.txt2img(*AUTO, n_iter=6)
    assert made == [{True}, {False}, {True}, {False}, {False}, {False}]
    timed.txt2img(False)
    assert untouched(timed) and not timed.errors_reported


class ControlNet(torch.nn.Module):
    """The first half of a UNet, and one 1x1 convolution, as those of its results."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        own, channels = copy.deepcopy(unet), unet.model_channels
        self.input_blocks, self.middle_block = own.input_blocks, own.middle_block
        self.zero_convs = torch.nn.ModuleList([torch.nn.Conv2d(channels, channels, 1).to(HALF)])

    def forward(self, x: Any, emb: Any, context: Any) -> Any:
        for block in self.input_blocks:
            x = block(x, emb, context)
        return self.middle_block(x, emb, context)


def test_controlnets_of_the_unets_patcher(forge: Any, gpu: FakeGpu) -> None:
    webui = forge(gpu=gpu, whole=True)
    webui.txt2img(*WITHOUT, steps=1)
    with torch.inference_mode():
        net, last = ControlNet(unet_of(webui)), unet_of(webui).time_embed[-1]
        generator = torch.Generator().manual_seed(1)
        shapes = ((2, 4, 8, 8), (2, last.out_features), (2, 7, 24))
        given = [torch.randn(shape, generator=generator).to(HALF) for shape in shapes]
        theirs, before = net(*given), [each.stride() for each in net.parameters()]
        linked = SimpleNamespace(control_model=net, previous_controlnet=None)
        patcher_of(webui).controlnet_linked_list = linked
        webui.txt2img(*AUTO, steps=1)
        ours = net(*given)
        assert 0 < apart(ours, theirs) < 0.04
        rows = session_of(webui).look() and session_of(webui).controlnets
        assert sum(row.ours for row in rows) == sum(row.total for row in rows) > 5
        webui.txt2img(False, steps=1)
        assert not session_of(webui).controlnets
        assert not any("forward" in vars(module) for module in net.modules())
        assert torch.equal(net(*given), theirs)
        assert [each.stride() for each in net.parameters()] == before
