"""What Forge Neo has otherwise than Forge, as far as it was read: on Forge's double, made like it.

Read in copies of Haoming02/sd-webui-forge-classic (its branch neo) of 2026 whose commits are not
known: backend/attention.py (wrap_attn, attention_function_vae), backend/operations.py
(ForgeWeights, get_weight_and_bias) and backend/patcher/base.py (OnlineLoRAPatch, LowVramPatch).
"""

from __future__ import annotations

import importlib
from functools import wraps
from typing import Any

import pytest
import torch
from conftest import FakeGpu, real
from forge_help import HALF, distance, same
from test_forge_unet import NEAR, ONE, counts, step, unet_of, why
from unet_help import AUTO

pytestmark = [
    ONE,
    pytest.mark.skipif(real() is not None, reason="the double is made like Neo, not a real Forge"),
]
OVERRIDE = "optimized_attention_override"


@pytest.fixture(autouse=True)
def norms(gpu: FakeGpu) -> None:
    gpu.norms = True


def wrapped(function: Any) -> Any:
    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        options = kwargs.pop("transformer_options", {})
        if OVERRIDE in options:
            return options[OVERRIDE](function, *args, **kwargs)
        return function(*args, **kwargs)

    return wrapper


def like_neo(webui: Any) -> None:
    """The names and wrappers of its attention."""
    home: Any = importlib.import_module("backend.attention")
    theirs = wrapped(home.attention_function)
    home.attention_function_vae = home.attention_function_single_head_spatial
    importlib.import_module("backend.nn.vae")  # it has the other name, which its forward asks for
    for name in ("unet", "flux"):
        importlib.import_module(f"backend.nn.{name}").attention_function = theirs
    home.attention_function = theirs
    del home.attention_function_single_head_spatial


def test_its_names(forge: Any, gpu: FakeGpu) -> None:
    expected = forge(extension=False).txt2img()
    webui = forge(gpu=gpu, before=like_neo)
    home = forge.home
    assert [type(home.attention_function).__name__, type(home.attention_function_vae).__name__] == [
        "Function",
        "Function",
    ]
    on = webui.txt2img(True, "Auto", "Off")
    assert 'ROCm SD: "Auto, attention: rocm_sd"' in on.info and 0 < distance(on, expected) < 0.1
    assert same(webui.txt2img(False), expected) and not webui.errors_reported
    assert "our kernel" in webui.status


def test_an_override_of_attention_is_asked(forge: Any, gpu: FakeGpu) -> None:
    webui = forge(gpu=gpu, whole=True, before=like_neo)
    webui.txt2img(*AUTO, steps=1)
    asked: list[Any] = []

    def override(function: Any, q: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(function.__name__)
        return torch.zeros_like(q)

    q = torch.randn(1, 4, 32).to(HALF)
    options = {OVERRIDE: override}
    made = forge.home.attention_function(q, q, q, 2, transformer_options=options)
    assert asked == ["attention_pytorch"] and not made.any()
    step(webui, **options)
    assert counts(webui)["transformer block"][0] == 0
    assert why(webui, "transformer block") == f"an {OVERRIDE} is set in this model"
    step(webui)
    ours, of = counts(webui)["transformer block"]
    assert ours == of


def give_functions(operations: Any, patch: pytest.MonkeyPatch) -> None:
    """Its layers have lists of them."""
    own = operations.get_weight_and_bias

    def get_weight_and_bias(layer: Any, *args: Any, **kwargs: Any) -> list[Any]:
        made = own(layer, *args, **kwargs)
        for index, key in enumerate(("weight_function", "bias_function")):
            for function in getattr(layer, key, []):
                made[index] = function(made[index])
        return made  # type: ignore[no-any-return]

    patch.setattr(operations, "get_weight_and_bias", get_weight_and_bias)
    for name in ("Linear", "Conv2d", "GroupNorm", "LayerNorm"):
        for key in ("weight_function", "bias_function"):
            patch.setattr(getattr(operations.ForgeOperations, name), key, [], raising=False)


@pytest.mark.parametrize("name", ["in_layers.2", "in_layers.0"])
def test_functions_of_weights_that_come_later(
    forge: Any, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Neo's LoRA in each call, and those of layers that it brings: functions in lists which its
    layers have already, while their flag says that nothing is cast.
    """

    def before(webui: Any) -> None:
        give_functions(importlib.import_module("backend.operations"), monkeypatch)

    webui = forge(gpu=gpu, whole=True, before=before)
    for module in unet_of(webui).modules():
        if hasattr(module, "weight_function"):
            module.weight_function, module.bias_function = [], []
    plain, ours = webui.txt2img(False, steps=1), webui.txt2img(*AUTO, steps=1)
    layer = unet_of(webui).middle_block[0].get_submodule(name)
    layer.weight_function.append(lambda weight: 8 * weight)
    changed = webui.txt2img(*AUTO, steps=1)
    assert "has its weights changed in each call" in why(webui, "residual block")
    expected = webui.txt2img(False, steps=1)
    assert distance(changed, expected) < NEAR / 2 and not same(expected, plain)
    assert not same(changed, ours)
    layer.weight_function.clear()
    assert same(webui.txt2img(*AUTO, steps=1), ours)
    assert same(webui.txt2img(False, steps=1), plain)
