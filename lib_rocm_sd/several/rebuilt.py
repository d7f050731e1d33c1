"""A UNet built from its blueprint, in a process that has nothing else of the host."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.several.blueprint import Row, tensors_of


def build(
    rows: Sequence[Row], packages: Mapping[str, Sequence[str]], device: torch.device
) -> nn.Module:
    """The UNet, at rest, with memory for its weights on `device`; these have no values yet.

    Raises ImportError and AttributeError where a class is not there.
    """
    _prepare(packages)
    made: dict[str, nn.Module] = {}
    for row in rows:
        module = _module(row, device)
        made[row["path"]] = module
        parent, _, name = row["path"].rpartition(".")
        if row["path"]:
            made[parent]._modules[name] = module
    unet = made[""]
    home = sys.modules[type(unet).__module__]
    if getattr(home, "th", None) is torch:
        home.th = Resizing()  # type: ignore[attr-defined]
    return unet


def tensors(unet: nn.Module) -> list[torch.Tensor]:
    """Its parameters and buffers, in the blueprint's order."""
    return [tensor for module in unet.modules() for _, tensor in tensors_of(module)]


class Resizing:
    """torch, but `cat` of two images of different sizes makes the first as large as the second, as
    the WebUI has it for pictures whose sides are no multiples of 64.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def cat(given: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        """torch.cat."""
        if len(given) == 2 and given[0].shape[-2:] != given[1].shape[-2:]:
            first = nn.functional.interpolate(given[0], given[1].shape[-2:], mode="nearest")
            given = (first, given[1])
        return torch.cat(list(given), dim)


def value_of(value: Any) -> Any:
    """What `blueprint.plain` was given."""
    if isinstance(value, list):
        return [value_of(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "dtype":
        return getattr(torch, inner)
    if kind == "tuple":
        return tuple(value_of(item) for item in inner)
    return {key: value_of(item) for key, item in inner.items()}


def _module(row: Row, device: torch.device) -> nn.Module:
    cls = _class(*row["class"])
    module: nn.Module = cls.__new__(cls)
    nn.Module.__init__(module)
    vars(module).update({name: value_of(value) for name, value in row["attributes"].items()})
    module.training = False
    for name, shape in row["parameters"].items():
        tensor = _empty(shape, device)
        module._parameters[name] = None if tensor is None else nn.Parameter(tensor, False)
    for name, shape in row["buffers"].items():
        module._buffers[name] = _empty(shape, device)
    for name, _ in row["children"]:
        module._modules[name] = None
    return module


def _empty(shape: Any, device: torch.device) -> torch.Tensor | None:
    if shape is None:
        return None
    return torch.empty(shape[0], dtype=getattr(torch, shape[1]), device=device)


def _class(home: str, name: str) -> Any:
    found: Any = importlib.import_module(home)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _prepare(packages: Mapping[str, Sequence[str]]) -> None:
    """Make the packages importable without what they import themselves: sgm's own import training
    code, of which the WebUI has stand-ins only.
    """
    for name, folders in packages.items():
        if name not in sys.modules:
            package = ModuleType(name)
            package.__path__ = list(folders)
            sys.modules[name] = package
            parent, _, last = name.rpartition(".")
            if parent in sys.modules:
                setattr(sys.modules[parent], last, package)
