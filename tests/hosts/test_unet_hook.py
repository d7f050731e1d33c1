"""The WebUI's networks and hypernetworks, and blocks of its UNet that are ours."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.hosts.webui.unet import WebUIHook
from lib_rocm_sd.unet import compute
from lib_rocm_sd.unet.takeover import take_over
from tests.unet import unet_models as models

BF16 = torch.bfloat16


@dataclass
class Network:
    """What the WebUI's Lora extension has of one; `changes` by a layer's name: weight and bias."""

    name: str
    unet_multiplier: float = 1.0
    te_multiplier: float = 1.0
    dyn_dim: int | None = None
    changes: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=dict)


class Networks(ModuleType):
    """Double of extensions-builtin/Lora/networks.py.

    The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd: attributes that a
    layer is given, the backup on the CPU, writing in place, a bias that comes and goes.
    """

    def __init__(self) -> None:
        super().__init__("networks")
        self.loaded_networks: list[Network] = []
        self.applied = 0

    def network_apply_weights(self, layer: Any) -> None:
        name = getattr(layer, "network_layer_name", None)
        if name is None:
            return
        current = getattr(layer, "network_current_names", ())
        wanted = tuple(
            (n.name, n.te_multiplier, n.unet_multiplier, n.dyn_dim) for n in self.loaded_networks
        )
        if current == wanted:
            return
        self.applied += 1
        if not hasattr(layer, "network_weights_backup"):
            layer.network_weights_backup = layer.weight.to("cpu", copy=True)
            bias = layer.bias
            layer.network_bias_backup = None if bias is None else bias.to("cpu", copy=True)
        with torch.no_grad():
            layer.weight.copy_(layer.network_weights_backup)
            if layer.network_bias_backup is None:
                layer.bias = None
            else:
                layer.bias.copy_(layer.network_bias_backup)
            for network in self.loaded_networks:
                self._add(layer, network, name)
        layer.network_current_names = wanted

    def _add(self, layer: Any, network: Network, name: str) -> None:
        if name not in network.changes:
            return
        weight, bias = network.changes[name]
        wide = layer.weight.float() + network.unet_multiplier * weight
        layer.weight.copy_(wide.to(layer.weight.dtype))
        if bias is not None and layer.bias is None:
            layer.bias = nn.Parameter(bias.to(layer.weight.dtype), requires_grad=False)
        elif bias is not None:
            layer.bias.copy_((layer.bias.float() + bias).to(layer.bias.dtype))


KINDS = (nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm)


@dataclass
class World:
    """A UNet whose layers call `networks` in their forwards, as the WebUI's do, and our hook."""

    networks: Networks
    shared: Any
    unet: Any
    hook: WebUIHook
    inputs: dict[str, Any]

    def network(
        self, name: str, seed: int, multiplier: float = 1.0, biases: bool = False
    ) -> Network:
        """A change of every second layer of each kind; with `biases` also of each bias."""
        made = Network(name, multiplier)
        layers = [m for m in self.unet.modules() if isinstance(m, KINDS)]
        for number, layer in enumerate(layers[::2]):
            low = models.draw(2, layer.weight[0].numel(), seed=seed + number)
            high = models.draw(len(layer.weight), 2, seed=seed + 1000 + number)
            weight = (0.1 * high @ low / low.shape[1] ** 0.5).view(layer.weight.shape)
            bias = 0.3 * models.draw(len(layer.weight), seed=seed + 2000) if biases else None
            made.changes[str(layer.network_layer_name)] = (weight, bias)
        return made

    def step(self) -> torch.Tensor:
        return models.step(self.unet, self.inputs)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    networks = Networks()
    monkeypatch.setitem(sys.modules, "networks", networks)
    shared: Any = ModuleType("modules.shared")
    shared.opts = SimpleNamespace(lora_functional=False, upcast_attn=False)
    shared.loaded_hypernetworks = []
    monkeypatch.setitem(sys.modules, "modules", ModuleType("modules"))
    monkeypatch.setitem(sys.modules, "modules.shared", shared)
    unet = models.ldm_unet().to(BF16)
    for name, module in unet.named_modules():
        if isinstance(module, KINDS):
            module.network_layer_name = name
    for kind in KINDS:
        own = kind.forward

        def applied(self: Any, x: Any, own: Any = own) -> Any:
            if networks.loaded_networks or not shared.opts.lora_functional:
                networks.network_apply_weights(self)
            return own(self, x)

        applied.__module__ = networks.__name__
        monkeypatch.setattr(kind, "forward", applied)
    inputs = models.in_dtype(models.ldm_inputs(), BF16)
    return World(networks, shared, unet, WebUIHook(), inputs)


def bytes_of(unet: nn.Module) -> dict[str, bytes]:
    state = {name: tensor.contiguous() for name, tensor in unet.named_parameters()}
    return {n: t.view(torch.uint8).numpy().tobytes() for n, t in state.items()}


def near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return models.errors(ours, theirs)[0] < 0.05


@pytest.mark.parametrize("biases", [False, True])
def test_networks_are_applied_switched_and_removed(world: World, biases: bool) -> None:
    one, two = (world.network(name, seed, biases=biases) for name, seed in (("a", 1), ("b", 9)))
    before = bytes_of(world.unet)
    plain = world.step()
    asked: list[list[Network]] = [[one], [two], [one, two], [], [two], []]
    theirs = []
    for loaded in asked:
        world.networks.loaded_networks = loaded
        theirs.append(world.step())
    assert not near(theirs[0], plain)
    assert not near(theirs[2], theirs[1])
    taken = take_over(world.unet, hook=world.hook)
    for loaded, wanted in zip(asked, theirs, strict=True):
        world.networks.loaded_networks = loaded
        assert near(world.step(), wanted)
    assert bytes_of(world.unet) == before
    taken.give_back()
    assert bytes_of(world.unet) == before
    assert torch.equal(world.step(), plain)


def test_taken_over_and_given_back_amid_a_network(world: World) -> None:
    """The WebUI's backup of a weight may be made before it is laid anew, or meanwhile."""
    before, strides = bytes_of(world.unet), [p.stride() for p in world.unet.parameters()]
    plain = world.step()
    world.networks.loaded_networks = [world.network("a", 1)]
    theirs = world.step()
    taken = take_over(world.unet, hook=world.hook)
    assert near(world.step(), theirs)
    taken.give_back()
    assert torch.equal(world.step(), theirs)
    taken = take_over(world.unet, hook=world.hook)
    world.networks.loaded_networks = []
    assert near(world.step(), plain)
    for module in world.unet.modules():
        vars(module).pop("network_weights_backup", None)
    world.networks.loaded_networks = [world.network("b", 9)]
    world.step()
    taken.give_back()
    world.networks.loaded_networks = []
    assert torch.equal(world.step(), plain)
    assert bytes_of(world.unet) == before
    assert [p.stride() for p in world.unet.parameters()] == strides


def test_another_multiplier_is_applied(world: World) -> None:
    weak, strong = world.network("a", 1, 0.25), world.network("a", 1, 2.0)
    theirs = []
    for network in (weak, strong):
        world.networks.loaded_networks = [network]
        theirs.append(world.step())
    take_over(world.unet, hook=world.hook)
    for network, wanted in zip((weak, strong), theirs, strict=True):
        world.networks.loaded_networks = [network]
        assert near(world.step(), wanted)


def test_nothing_is_applied_twice(world: World) -> None:
    take_over(world.unet, hook=world.hook)
    world.networks.loaded_networks = [world.network("a", 1)]
    world.step()
    applied = world.networks.applied
    world.step()
    assert world.networks.applied == applied
    assert applied == sum(isinstance(module, KINDS) for module in world.unet.modules())


def test_functional_networks_are_the_webuis(world: World) -> None:
    taken = take_over(world.unet, hook=world.hook)
    world.networks.loaded_networks = [world.network("a", 1)]
    world.shared.opts.lora_functional = True
    ours = world.step()
    taken.give_back()
    assert torch.equal(ours, world.step())


def test_functional_networks_that_were_removed_leave_the_weights_as_they_are(world: World) -> None:
    """The WebUI's forwards then restore nothing: whatever was applied before stays applied."""
    taken = take_over(world.unet, hook=world.hook)
    world.networks.loaded_networks = [world.network("a", 1)]
    applied = world.step()
    world.shared.opts.lora_functional = True
    world.networks.loaded_networks = []
    assert torch.equal(world.step(), applied)
    assert all(row.ours == row.total for row in taken.report())
    world.shared.opts.lora_functional = False
    assert not near(world.step(), applied)


def test_an_error_while_networks_are_applied_is_the_webuis(world: World) -> None:
    plain = world.step()
    taken = take_over(world.unet, hook=world.hook)
    world.networks.loaded_networks = [world.network("a", 1)]
    world.step()
    network = world.network("b", 1)
    network.changes["input_blocks.1.0.in_layers.2"] = (torch.zeros(5), None)
    world.networks.loaded_networks = [network]
    with pytest.raises(RuntimeError, match="size"):
        world.step()
    world.networks.loaded_networks = []
    assert near(world.step(), plain)
    assert all(row.ours == row.total for row in taken.report())


@pytest.mark.parametrize("what", ["a name unknown", "another note"])
def test_networks_of_an_unknown_kind_are_the_webuis(world: World, what: str) -> None:
    taken = take_over(world.unet, hook=world.hook)
    network: Any = world.network("a", 1)
    if what == "a name unknown":
        network = SimpleNamespace(name="a", changes=network.changes)
        own = world.networks.network_apply_weights
        world.networks.network_apply_weights = (  # type: ignore[method-assign]
            lambda layer: own(layer) if not world.networks.loaded_networks else None
        )
    else:
        world.networks.network_apply_weights = (  # type: ignore[method-assign]
            lambda layer: setattr(layer, "network_current_names", ("a",))
        )
    world.networks.loaded_networks = [network]
    ours = world.step()
    taken.give_back()
    assert torch.equal(ours, world.step())


def test_no_networks_at_all(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = world.step()
    monkeypatch.delitem(sys.modules, "networks")
    taken = take_over(world.unet, hook=world.hook)
    assert near(world.step(), theirs)
    assert all(row.ours == row.total for row in taken.report())


@pytest.mark.parametrize("what", ["hypernetwork", "upcast", "aside"])
def test_attention_that_is_the_webuis_is_called(
    world: World, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside: list[int] = []
    calls: list[int] = []
    attention = compute.attention

    def counted(*args: Any) -> Any:
        calls.append(1)
        return attention(*args)

    monkeypatch.setattr(compute, "attention", counted)
    take_over(world.unet, hook=WebUIHook(lambda: bool(aside)))
    world.step()
    assert len(calls) == 8
    if what == "hypernetwork":
        world.shared.loaded_hypernetworks.append(object())
    elif what == "upcast":
        world.shared.opts.upcast_attn = True
    else:
        aside.append(1)
    world.step()
    assert len(calls) == 8
