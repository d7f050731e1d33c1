"""A UNet, or a VAE's decoder, as data, so that another process can build one like it: the classes
of its modules, their plain attributes, the shapes of their weights. Nothing is pickled, and no
constructor is called.

What cannot be said so, or was changed by somebody, is a reason why there is no copy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.modules.code import INNER
from lib_rocm_sd.modules.patches import is_the_classs, named

FAMILIES = ("ldm", "sgm")
"""The packages whose modules are known."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_OURS = "lib_rocm_sd"
_OF_ALL_MODULES = frozenset(vars(nn.Module()))
_KEPT_BESIDE = ("network_", "fp16_")
"""How attributes begin that the WebUI keeps on layers: networks' and float8's backups."""
_NOTED = ("weighted_forward", "last_z_shape")
"""Attributes that compute nothing; a decoder notes in the last what it was called with."""
_GLOBALS = ("th", "timestep_embedding")
"""Names in a UNet's Python module through which its forward computes."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Blueprint:
    """`rows`: one for each module, the root first, JSON-able. `packages`: the folders of those that
    the classes are in. Equal ones build equal modules.
    """

    rows: list[Row]
    packages: dict[str, list[str]]

    def parameters(self, unet: nn.Module) -> list[torch.Tensor]:
        """Parameters and buffers of `unet`, in the order in which the rows have them."""
        return [tensor for module in unet.modules() for _, tensor in tensors_of(module)]


def read(
    module: nn.Module, hosts_own: Sequence[str] = (), name: str = "the UNet"
) -> tuple[Blueprint | None, list[str]]:
    """The blueprint of `module`, or the reasons why there is none. `name`: what they call it.

    `hosts_own`: Python modules of the host whose forwards, put into classes, and whose globals
    compute what the classes' own do.
    """
    family = type(module).__module__.partition(".")[0]
    if family not in FAMILIES:
        return None, [f"{name} is of {family or 'an unknown kind'}, of which there is no copy"]
    reasons = dict.fromkeys(_global_reasons(module, family, hosts_own))
    rows: list[Row] = []
    for path, part in module.named_modules():
        where = path or name
        reasons |= dict.fromkeys(_reasons(where, part, part is module, family, hosts_own))
        try:
            rows.append(_row(path, part))
        except ValueError as error:
            reasons[f"{where}: {error}"] = None
    if reasons:
        return None, list(reasons)
    return Blueprint(rows, _packages(module)), []


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of `module` itself, by name."""
    both = (*module._parameters.items(), *module._buffers.items())
    return ((name, tensor) for name, tensor in both if tensor is not None)


def plain(value: Any) -> Any:
    """`value` for JSON; ValueError where it is nothing plain."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple):
        return {"tuple": [plain(item) for item in value]}
    if isinstance(value, (Sequence, Set)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: plain(item) for key, item in value.items()}}
    raise ValueError(f"a {type(value).__name__}")


def _row(path: str, module: nn.Module) -> Row:
    cls = type(module)
    attributes = {}
    for name, value in vars(module).items():
        kept_beside = name.startswith(_KEPT_BESIDE) or name in (*INNER, *_NOTED)
        if name in _OF_ALL_MODULES or kept_beside:
            continue
        try:
            attributes[name] = plain(value)
        except ValueError as error:
            raise ValueError(f"its {name} is {error}") from None
    return {
        "path": path,
        "class": [cls.__module__, cls.__qualname__],
        "attributes": attributes,
        "children": [[name, child is not None] for name, child in module._modules.items()],
        "parameters": {name: _shape(tensor) for name, tensor in module._parameters.items()},
        "buffers": {name: _shape(tensor) for name, tensor in module._buffers.items()},
    }


def _shape(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    if tensor.dtype not in DTYPES:
        raise ValueError(f"its weights are {str(tensor.dtype).removeprefix('torch.')}")
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        raise ValueError(f"a weight is a {type(tensor).__name__}")
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


def _reasons(
    name: str, module: nn.Module, is_root: bool, family: str, hosts_own: Sequence[str]
) -> Iterator[str]:
    """Who has changed what this module computes."""
    cls = type(module)
    root = cls.__module__.partition(".")[0]
    if root not in (family, "torch", *FAMILIES):
        yield f"{name} is a {cls.__name__} of {cls.__module__}"
        return
    for key in INNER:
        own = vars(module).get(key)
        ours = type(own).__module__.startswith(_OURS)
        if not (own is None or is_root or ours or is_the_classs(own, module, key)):
            yield f"{name}.{key} has been replaced ({named(own)})"
    if not is_root and (module._forward_hooks or module._forward_pre_hooks):
        yield f"{name} has forward hooks"
    if module.training:
        yield f"{name} is in training"
    yield from _class_reasons(cls, hosts_own)


def _class_reasons(cls: type, hosts_own: Sequence[str]) -> Iterator[str]:
    for key in INNER:
        owner = next((base for base in cls.__mro__ if key in vars(base)), None)
        if owner is None:
            continue
        source = str(getattr(vars(owner)[key], "__module__", ""))
        known = source == owner.__module__ or source in hosts_own or source.startswith(_OURS)
        if not known:
            yield f"{cls.__name__}.{key} has been replaced by {source or 'somebody'}"


def _global_reasons(unet: nn.Module, family: str, hosts_own: Sequence[str]) -> Iterator[str]:
    """Who has put something else into the Python module of the UNet's class (FreeU does)."""
    home = sys.modules.get(type(unet).__module__)
    for name in _GLOBALS:
        value = getattr(home, name, None)
        if value is None or value is torch:
            continue
        source = value if callable(value) else type(value)
        where = str(getattr(source, "__module__", ""))
        cat = getattr(type(value), "cat", None)
        changed = "cat" in getattr(value, "__dict__", ())
        of_cat = str(getattr(cat, "__module__", where))
        known = all(w in hosts_own or w.partition(".")[0] == family for w in (where, of_cat))
        if not known or changed:
            yield f"{name} of {type(unet).__module__} has been replaced by {where or 'somebody'}"


def _packages(unet: nn.Module) -> dict[str, list[str]]:
    """The folders of all packages around the modules' classes, but torch's."""
    found: dict[str, list[str]] = {}
    for home in {type(module).__module__ for module in unet.modules()}:
        parts = home.split(".")
        for end in range(1, len(parts)):
            name = ".".join(parts[:end])
            folders = getattr(sys.modules.get(name), "__path__", None)
            if parts[0] != "torch" and folders is not None:
                found[name] = [str(folder) for folder in folders]
    return dict(sorted(found.items()))
