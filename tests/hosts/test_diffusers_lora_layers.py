"""Layers with PEFT's adapters, of PEFT itself: what they are read as, how exact the copy of a
weight with its adapters is, and when it is made anew.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.hosts.read.findings import Findings
from lib_rocm_sd.unet.merged import MergedLayers
from tests.unet import unet_models as models
from tests.vae.vae_models import needs_half

pytest.importorskip("diffusers", reason="diffusers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

from tests.hosts.test_diffusers_lora import BF16, config

HALVES = [BF16, pytest.param(torch.float16, marks=needs_half)]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 40)
        self.small = nn.Conv2d(48, 40, 1)
        self.large = nn.Conv2d(48, 40, 3, padding=1, bias=False)


def read(layers: Any, name: str) -> tuple[Any, Findings]:
    """What a layer is read as."""
    import lib_rocm_sd.hosts.read  # noqa: F401 - knows the layers of adapters

    found = Findings("tests")
    if name == "linear":
        return found.linear(layers, name), found
    return found.conv(layers, name, kernel=1 if name == "small" else 3), found


def injected(dtype: torch.dtype, *options: dict[str, Any]) -> Any:
    """The layers with adapters "0", "1" and so on, all active."""
    torch.manual_seed(2)
    layers = models.fill(Layers()).to(dtype)
    for number, option in enumerate(options):
        made = config(**{"target_modules": ["linear", "small", "large"], **option})
        peft.inject_adapter_in_model(made, layers, str(number))
    for module in layers.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.set_adapter([str(number) for number in range(len(options))])
            for magnitude in module.lora_magnitude_vector.values():
                magnitude.weight.data.mul_(1.5)
    return layers.to(dtype).eval().requires_grad_(False)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["linear", "small", "large"])
@pytest.mark.parametrize(
    "options",
    [
        [{"rank": 4}],
        [{"rank": 3}, {"rank": 8, "use_rslora": True}],
        [{"rank": 4, "lora_alpha": 0}],
        [{"rank": 4, "use_dora": True}],
        [{"rank": 4, "use_dora": True}, {"rank": 2}, {"rank": 3, "use_dora": True}],
    ],
    ids=["one", "two ranks", "scale 0", "DoRA", "DoRA and others"],
)
@torch.no_grad()
def test_a_layer_errs_at_most_twice_as_much_as_by_torch(
    options: list[dict[str, Any]], name: str, dtype: torch.dtype
) -> None:
    layers = injected(dtype, *options)
    leaf, found = read(layers, name)
    assert not found.reasons
    assert leaf.obstacle() == "" and leaf.is_stale()
    leaf.renew()
    assert not leaf.is_stale()
    x = models.draw(64, 48) if name == "linear" else models.draw(4, 48, 6, 6)
    x = x.to(dtype)
    exact = copy.deepcopy(getattr(layers, name)).double()(x.double())
    theirs, ours = getattr(layers, name)(x), leaf(x)
    assert ours.dtype == dtype
    assert models.errors(ours, exact)[1] <= 2 * models.errors(theirs, exact)[1]


@torch.no_grad()
def test_only_layers_that_changed_are_made_anew_and_another_bias_is_read() -> None:
    layers = injected(BF16, {"rank": 4})
    leaves = [read(layers, name)[0] for name in ("linear", "small", "large")]
    merged = MergedLayers([*leaves, layers])
    assert merged.stale() == leaves
    for leaf in leaves:
        leaf.renew()
    assert merged.stale() == []
    linear, small, large = (getattr(layers, name) for name in ("linear", "small", "large"))
    linear.base_layer.bias = nn.Parameter(linear.base_layer.bias + 1, False)
    assert merged.stale() == [] and leaves[0].bias is linear.base_layer.bias
    small.scaling["0"] *= 1 + 2**-40
    assert merged.stale() == []
    small.scaling["0"] *= 2
    large.lora_A["0"].weight.add_(1)
    assert merged.stale() == leaves[1:]
    linear.lora_B["0"].weight = None
    assert merged.stale() == leaves
    assert leaves[0].obstacle() == "an adapter was taken away"


@torch.no_grad()
def test_scales_in_another_dict_count_and_a_tensor_is_no_scale_for_ours() -> None:
    """PEFT makes tensors of all scales to prepare for hot swaps, and writes to them in place."""
    layer = injected(BF16, {"rank": 4})
    leaf, _ = read(layer, "linear")
    merged, own = MergedLayers([leaf]), layer.linear
    leaf.renew()
    assert merged.stale() == []
    own.scaling = {"0": -own.scaling["0"]}
    assert merged.stale() == [leaf]
    leaf.renew()
    assert merged.stale() == []
    own.scaling["0"] = torch.tensor(own.scaling["0"])
    for _ in range(2):
        assert merged.stale() == [leaf]
    assert leaf.obstacle() == "the scale of an adapter is no number"


@torch.no_grad()
def test_a_copy_that_ctrl_c_interrupts_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: torch.Tensor) -> Any:
        raise KeyboardInterrupt

    layer = injected(BF16, {"rank": 4})
    leaf, _ = read(layer, "linear")
    missing_bytes = leaf.missing_bytes()
    leaf.renew()
    assert (missing_bytes, leaf.missing_bytes()) == (leaf.copy_bytes, 0)
    own = layer.linear.scaling
    own["0"] *= -3
    with monkeypatch.context() as patching, pytest.raises(KeyboardInterrupt):
        patching.setattr(torch.Tensor, "clone", interrupted)
        leaf.renew()
    own["0"] /= -3
    assert leaf.is_stale()


def _with(**options: Any) -> Callable[[], Any]:
    return lambda: injected(BF16, {"rank": 4, **options})


def _changed(change: Callable[[Any], Any]) -> Callable[[], Any]:
    def made() -> Any:
        layers = injected(BF16, {"rank": 4})
        change(layers.linear)
        return layers

    return made


def _loha() -> Any:
    layers = models.fill(Layers()).to(BF16)
    peft.inject_adapter_in_model(peft.LoHaConfig(r=2, target_modules=["linear"]), layers)
    return layers


def _disabled_while_merged(layer: Any) -> None:
    layer.merge()
    layer.enable_adapters(False)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "LoHa": (_loha, "linear is a Linear of peft.tuners.loha.layer"),
    "a bias of its own": (_with(lora_bias=True), "linear.0 has a bias"),
    "dropout in training": (
        _changed(
            lambda layer: layer.lora_dropout.update({"0": nn.Dropout(0.5)}) or layer.train(True)
        ),
        "linear.0.lora_dropout.0 is a Dropout: not a dropout at rest",
    ),
    "hooks, as of adapters for each sample": (
        _changed(lambda layer: layer.register_forward_pre_hook(lambda *_: None)),
        "linear has forward hooks",
    ),
    "a hook within": (
        _changed(lambda layer: layer.lora_A["0"].register_forward_hook(lambda *_: None)),
        "linear.0.lora has forward hooks",
    ),
    "a forward of another's": (
        _changed(lambda layer: setattr(layer, "forward", lambda x: x)),
        "linear.forward has been replaced",
    ),
    "no scale of its own": (
        _changed(lambda layer: layer.scaling.update({"0": torch.ones(())})),
        "linear.0 has a scale that is a Tensor",
    ),
    "another variant": (
        _changed(lambda layer: layer.lora_variant.update({"0": object()})),
        "linear.0 is a variant of LoRA (object)",
    ),
    "columns for rows": (
        _changed(lambda layer: setattr(layer, "fan_in_fan_out", True)),
        "linear.fan_in_fan_out is True",
    ),
    "disabled while merged": (
        _changed(_disabled_while_merged),
        "linear has merged adapters that are disabled",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_more_than_an_adapter_is_the_hosts_with_the_reason(name: str) -> None:
    make, why = REFUSED[name]
    _, found = read(make(), "linear")
    assert why in "; ".join(found.reasons)


def test_an_adapter_that_was_left_elsewhere_is_the_hosts() -> None:
    layers = injected(BF16, {"rank": 4})
    leaf, _ = read(layers, "linear")
    layers.linear.lora_A["0"].to("meta")
    assert "lies on another device" in leaf.obstacle()
    with torch.inference_mode():
        layers.linear.lora_A["0"].weight = nn.Parameter(torch.ones(4, 48), False)
    assert "made in inference mode" in leaf.obstacle()
