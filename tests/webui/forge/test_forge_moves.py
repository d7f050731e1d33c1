"""Models that a Forge has loaded in parts: whose the blocks are whose weights it brings, or
changes, in each call.

Its own code moves them where a real one is there: backend/memory_management.py of
lllyasviel/stable-diffusion-webui-forge dfdcbab6 loads in parts, and of
Panchovix/stable-diffusion-webui-reForge 3b56b268 ldm_patched/modules/model_patcher.py unloads
parts.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import FakeGpu
from forge_help import CPU, distance, same
from test_forge_unet import CAST, NEAR, counts, lora, patcher_of, unet_of, why
from unet_help import AUTO

MEMORY = {"forge": "backend.memory_management", "reforge": "ldm_patched.modules.model_management"}
KINDS = {"ResBlock": "residual block", "Upsample": "upsampling", "Downsample": "downsampling"}


@pytest.fixture(autouse=True)
def norms(gpu: FakeGpu) -> None:
    gpu.norms = True


@contextmanager
def in_parts(forge: Any, patcher: Any, share: float = 0.6) -> Iterator[None]:
    """So much of a loaded model stays on the device."""
    sizes = [p.numel() * p.element_size() for p in patcher.model.parameters()]
    if forge.kind == "reforge":
        if not hasattr(patcher, "partially_unload"):
            pytest.skip("this one's patchers cannot unload parts")
        patcher.partially_unload(CPU, int((1 - share) * sum(sizes)))
        yield
        patcher.load(CPU, full_load=True)
        return
    memory: Any = importlib.import_module(MEMORY[forge.kind])
    loaded = memory.LoadedModel(patcher)
    loaded.model_load(int(share * sum(sizes)))
    yield
    loaded.model_unload(avoid_model_moving=True)


def brought(forge: Any, module: torch.nn.Module) -> bool:
    return any(getattr(each, CAST[forge.kind], False) for each in module.modules())


def expected_counts(forge: Any, webui: Any) -> dict[str, tuple[int, int]]:
    """Of kinds that have no parts which are called as they are."""
    found: dict[str, list[bool]] = {kind: [] for kind in KINDS.values()}
    for module in unet_of(webui).modules():
        if type(module).__name__ in KINDS:
            found[KINDS[type(module).__name__]].append(not brought(forge, module))
    return {kind: (sum(ours), len(ours)) for kind, ours in found.items()}


def test_a_model_that_is_loaded_in_parts(forge: Any, gpu: FakeGpu) -> None:
    webui = forge(gpu=gpu, whole=True)
    plain = webui.txt2img(False, steps=1)
    whole = webui.txt2img(*AUTO, steps=1)
    with in_parts(forge, patcher_of(webui)):
        on = webui.txt2img(*AUTO, steps=1)
        found = counts(webui)
        asked = expected_counts(forge, webui)
        assert {kind: found[kind] for kind in asked} == asked
        assert 0 < sum(ours for ours, _ in found.values()) < sum(of for _, of in found.values())
        assert "brings its weights from elsewhere" in why(webui, "residual block")
        assert distance(on, plain) < NEAR and 'ROCm SD: "Auto, attention: rocm_sd"' in on.info
        assert same(webui.txt2img(False, steps=1), plain)
        assert same(webui.txt2img(*AUTO, steps=1), on)
    assert same(webui.txt2img(*AUTO, steps=1), whole)
    assert all(ours == of for ours, of in counts(webui).values())
    assert same(webui.txt2img(False, steps=1), plain) and not webui.errors_reported


ELSEWHERE = {
    "in_layers.2": "residual block",
    "emb_layers.1": "residual block",
    "attn1.to_q": "transformer block",
    "ff.net.2": "transformer block",
}
CASTS = {
    "forge": ("backend.operations", "get_weight_and_bias"),
    "reforge": ("ldm_patched.modules.ops", "cast_bias_weight"),
}
"""Where layers get what they compute with."""


@pytest.mark.parametrize("name", ELSEWHERE)
def test_weights_on_another_device(
    forge: Any, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The first layer of this name; on the meta device, from which its own function brings it."""
    webui = forge(gpu=gpu, whole=True)
    whole, kind = webui.txt2img(*AUTO, steps=1), ELSEWHERE[name]
    layer = next(m for path, m in unet_of(webui).named_modules() if path.endswith(name))
    kept, operations = layer.weight, importlib.import_module(CASTS[forge.kind][0])
    with torch.inference_mode():
        away = torch.nn.Parameter(kept.to("meta"), requires_grad=False)
    own, brought_times = getattr(operations, CASTS[forge.kind][1]), []

    def bring(asked: Any, *args: Any, **kwargs: Any) -> Any:
        if asked is not layer:
            return own(asked, *args, **kwargs)
        brought_times.append(1)
        layer.weight = kept
        try:
            return own(asked, *args, **kwargs)
        finally:
            layer.weight = away

    bring.__module__ = operations.__name__
    monkeypatch.setattr(operations, CASTS[forge.kind][1], bring)
    layer.weight = away
    setattr(layer, CAST[forge.kind], True)
    on = webui.txt2img(*AUTO, steps=1)
    ours, of = counts(webui)[kind]
    partly = kind == "transformer block"
    assert ours == (of if partly else of - 1) and brought_times
    assert f"{name} brings its weights from elsewhere" in why(webui, kind)
    assert distance(on, whole) < NEAR / 3
    layer.weight = kept
    setattr(layer, CAST[forge.kind], False)
    assert same(webui.txt2img(*AUTO, steps=1), whole) and not webui.errors_reported


@pytest.mark.parametrize(
    ("forge", "online"),
    [("forge", False), ("forge", True), ("reforge", False)],
    indirect=["forge"],
)
def test_loras_of_a_model_in_parts(forge: Any, gpu: FakeGpu, online: bool) -> None:
    """reForge has them as functions of the weights that it brings, Forge's are in these, or it
    makes them in each call.
    """
    webui = forge(gpu=gpu, whole=True)
    plain = webui.txt2img(False, steps=1)
    webui.txt2img(*AUTO, steps=1)
    lora(webui, online)
    whole = webui.txt2img(*AUTO, steps=1)
    with in_parts(forge, patcher_of(webui)):
        on = webui.txt2img(*AUTO, steps=1)
        if forge.kind == "reforge":
            assert any(getattr(m, "weight_function", []) for m in unet_of(webui).modules())
        expected = webui.txt2img(False, steps=1)
        assert distance(on, expected) < NEAR < distance(expected, plain)
    assert same(webui.txt2img(*AUTO, steps=1), whole)


def test_a_model_that_was_moved_away_and_back(forge: Any, gpu: FakeGpu) -> None:
    """As --always-offload-from-vram and --always-no-vram do after each use: its parameters stay the
    same objects, at other places.
    """
    webui = forge(gpu=gpu, whole=True)
    expected = webui.txt2img(*AUTO, steps=1)
    kept = []  # so that nothing comes to lie where it was
    for parameter in unet_of(webui).parameters():
        with torch.inference_mode():
            kept.append(parameter.data)
            parameter.data = parameter.data.clone()
    assert same(webui.txt2img(*AUTO, steps=1), expected)
    assert all(ours == of for ours, of in counts(webui).values())


def test_a_vae_that_is_always_loaded_in_parts_needs_forges_memory(
    forge: Any, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --always-no-vram its layers cast only between being loaded for a decode, for which so
    much was made free, and being unloaded.
    """
    gpu.convs = True
    webui = forge(gpu=gpu)
    vae, flag = webui.shared.sd_model.forge_objects.vae, CAST[forge.kind]
    memory: Any = importlib.import_module(MEMORY[forge.kind])
    conv, load, asked = vae.first_stage_model.decoder.conv_in, memory.load_models_gpu, []

    def load_in_parts(models: Any, memory_required: float = 0, **more: Any) -> Any:
        asked.append(memory_required)
        made = load(models, memory_required, **more)
        setattr(conv, flag, True)
        return made

    def unload(self: Any, p: Any, *args: Any, **kwargs: Any) -> None:
        setattr(conv, flag, False)

    kind = type("Other", (webui.scripts.Script,), {"post_sample": unload})
    other = kind()
    other.args_from = other.args_to = 0
    webui.scripts.scripts_txt2img.alwayson_scripts.append(other)
    monkeypatch.setattr(memory, "load_models_gpu", load_in_parts)
    first, second = webui.txt2img(True, steps=1), webui.txt2img(True, steps=1)
    assert all("whole frame" not in each.info for each in (first, second))
    assert "conv_in brings its weights from elsewhere" in webui.status
    monkeypatch.setattr(memory, "load_models_gpu", load)
    third = webui.txt2img(True, steps=1)
    assert "whole frame" in third.info
    monkeypatch.setattr(memory, "load_models_gpu", load_in_parts)
    webui.txt2img(True, steps=1)
    of_decodes = [each for each in asked if each]
    own = vae.memory_used_decode((1, 4, 8, 8), torch.bfloat16)
    assert len(of_decodes) == 3 and of_decodes[0] == of_decodes[2] < of_decodes[1] == own
