"""A module as it was when it was read, so that an unchanged one need not be read again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.modules.code import surroundings

CONV_SETTINGS = ("stride", "padding", "dilation", "groups", "padding_mode")
"""What a convolution computes follows from, beside its weights."""


@dataclass(frozen=True)
class _Seen:
    """A module and what it had: attributes, children, and which parameters and buffers."""

    module: nn.Module
    cls: type
    attributes: dict[str, Any]
    children: dict[str, nn.Module | None]
    parameters: list[str]
    buffers: list[str]


class Structure:
    """All of a module tree that reading it could depend on, but the values of its parameters.

    `same()` is True only if reading it again would give what it gave when this was made.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._seen = [_seen(module) for module in root.modules()]
        classes = {base for seen in self._seen for base in seen.cls.__mro__ if base is not object}
        self._classes = [(cls, dict(vars(cls))) for cls in classes]
        self._around = surroundings()
        tensors = (v for seen in self._seen for v in seen.attributes.values())
        if any(isinstance(value, torch.Tensor) for value in tensors):
            self._seen = []  # neither to be compared nor to be kept alive

    def same(self) -> bool:
        """True if nothing has changed: no attribute, child or hook, no class that is in use, and
        nothing of torch's that all of them run.
        """
        try:
            same = bool(self._seen) and surroundings() == self._around
            return same and self._same_modules() and self._same_classes()
        except (RuntimeError, TypeError, ValueError):
            return False  # attributes that cannot be compared

    def _same_modules(self) -> bool:
        for seen in self._seen:
            module = seen.module
            if (
                type(module) is not seen.cls
                or vars(module) != seen.attributes
                or module._modules != seen.children
                or _given(module._parameters) != seen.parameters
                or _given(module._buffers) != seen.buffers
            ):
                return False
            hooked = module._forward_hooks or module._forward_pre_hooks
            if hooked and module is not self._root:
                return False
        return True

    def _same_classes(self) -> bool:
        return all(vars(cls) == attributes for cls, attributes in self._classes)


def _seen(module: nn.Module) -> _Seen:
    return _Seen(
        module,
        type(module),
        dict(vars(module)),
        dict(module._modules),
        _given(module._parameters),
        _given(module._buffers),
    )


def _given(tensors: Mapping[str, torch.Tensor | None]) -> list[str]:
    """The names of those that are there."""
    return [name for name, tensor in tensors.items() if tensor is not None] if tensors else []
