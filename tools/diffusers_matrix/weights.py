"""Weights that others write, replace or share after a step with ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tools.diffusers_matrix import ways
from tools.diffusers_matrix.models import Row, Scene
from tools.diffusers_matrix.ways import written

PARAMETERS = (
    *("conv1.weight", "conv2.bias", "attn1.to_q.weight", "attn2.to_k.weight"),
    *("time_emb_proj.bias", "conv_out.bias"),
)


def rows() -> Iterator[Row]:
    for path in PARAMETERS:
        for name, write in ways.WRITES.items():
            yield Row(f"{path}: {name}", written(path, write))
        for name, change in (("before", _by_state_before), ("while ours is on", _by_state)):
            yield Row(f"{path}: by a state_dict taken {name}", change(path))
    yield Row("state_dict taken while ours is on, written later", _by_state_later)
    yield Row("state_dict read while ours is on", _state_read, changes=False)
    yield Row("EMAModel", ways.done(_ema))
    yield Row("torch._foreach_mul_", ways.done(_foreach))
    yield Row("conv1 and conv2 share a weight", ways.done(_tied), lies=False)
    yield Row("weight_norm of conv1", ways.done(_weight_norm), lies=False)
    yield Row("a parametrization of attn1.to_q", ways.done(_parametrized))
    yield Row("pruned conv1", ways.done(_pruned), lies=False)
    layout = ways.done(_channels_last)
    yield Row("to(memory_format=torch.channels_last)", layout, changes=False, lies=False)
    yield Row("to another dtype and back", ways.done(_there_and_back), changes=False)


def _write_by(state: dict[str, torch.Tensor], path: str) -> None:
    for name, tensor in state.items():
        if name == path or name.endswith(f".{path}"):
            tensor.copy_(ways.other_values(tensor))


def _by_state_before(path: str) -> Any:
    def change(scene: Scene) -> Iterator[None]:
        state = scene.unet.state_dict()
        yield
        _write_by(state, path)
        yield
        _write_by(state, path)

    return change


def _by_state(path: str) -> Any:
    def do(scene: Scene) -> Callable[[], Any]:
        state = scene.unet.state_dict()
        _write_by(state, path)
        return lambda: _write_by(state, path)

    return ways.done(do)


def _by_state_later(scene: Scene) -> Iterator[None]:
    yield
    state = scene.unet.state_dict()
    yield
    _write_by(state, "conv1.weight")
    _write_by(state, "attn1.to_q.weight")


def _state_read(scene: Scene) -> Iterator[None]:
    """Its values are those of the parameters, and lie as they lie by the host alone."""
    yield
    own = {name: tensor for name, tensor in scene.unet.named_parameters()}
    began = time.perf_counter()
    state = scene.unet.state_dict()
    took_ms = 1e3 * (time.perf_counter() - began)
    copies = [
        tensor
        for name, tensor in state.items()
        if tensor.untyped_storage().data_ptr() != own[name].untyped_storage().data_ptr()
    ]
    if not all(torch.equal(own[name], tensor) for name, tensor in state.items()):
        raise AssertionError("a state_dict has other values")
    if not all(tensor.is_contiguous() for tensor in state.values()):
        raise AssertionError("a state_dict has tensors that are not contiguous")
    bytes_copied = sum(tensor.nbytes for tensor in copies)
    scene.notes.append(f"state_dict: {bytes_copied} bytes copied, {took_ms:.1f} ms")
    yield


def _ema(scene: Scene) -> Callable[[], Any]:
    """As training scripts make a picture with averaged weights."""
    from diffusers.training_utils import EMAModel

    parameters = list(scene.unet.parameters())
    average = EMAModel(parameters)
    average.shadow_params = [ways.other_values(tensor) for tensor in average.shadow_params]
    average.store(parameters)
    average.copy_to(parameters)
    return lambda: average.restore(parameters)


def _foreach(scene: Scene) -> Callable[[], Any]:
    """As optimizers and averages write all weights."""
    weights = [tensor for tensor in scene.unet.parameters() if tensor.ndim > 1]
    torch._foreach_mul_(weights, -1.0)
    return lambda: torch._foreach_mul_(weights, -1.0)


def _tied(scene: Scene) -> Callable[[], Any]:
    pairs = [
        (block.conv1, block.conv2.weight, block.conv1.weight)
        for block in scene.every("resnets.0")
        if block.conv1.weight.shape == block.conv2.weight.shape
    ]
    for conv, weight, _ in pairs:
        conv.weight = weight

    def undo() -> None:
        for conv, _, weight in pairs:
            conv.weight = weight

    return undo


def _weight_norm(scene: Scene) -> Callable[[], Any]:
    convs = scene.every("conv1")
    for conv in convs:
        parametrizations.weight_norm(conv)
        with torch.no_grad():
            conv.parametrizations.weight.original0.mul_(-1)

    def undo() -> None:
        for conv in convs:
            parametrize.remove_parametrizations(conv, "weight")
            conv.requires_grad_(False)

    return undo


class _Negative(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x


def _parametrized(scene: Scene) -> Callable[[], Any]:
    layers = scene.every("attn1.to_q")
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", _Negative())

    def undo() -> None:
        for layer in layers:
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)

    return undo


def _pruned(scene: Scene) -> Callable[[], Any]:
    convs = scene.every("conv1")
    for conv in convs:  # by a mask: torch's own choices of one take contiguous weights only
        mask = (conv.weight.abs() > conv.weight.abs().float().quantile(0.7)).to(conv.weight.dtype)
        prune.custom_from_mask(conv, "weight", mask)
    return lambda: [prune.remove(conv, "weight") for conv in convs]


def _channels_last(scene: Scene) -> Callable[[], Any]:
    scene.unet.to(memory_format=torch.channels_last)
    return lambda: scene.unet.to(memory_format=torch.contiguous_format)


def _there_and_back(scene: Scene) -> Callable[[], Any]:
    scene.unet.to(torch.float64).to(scene.dtype)
    return lambda: None
