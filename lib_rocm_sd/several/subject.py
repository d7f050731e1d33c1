"""A module that is to be computed on several cards, looked at before each call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.engine.memory import version_of
from lib_rocm_sd.modules.structure import CONV_SETTINGS
from lib_rocm_sd.modules.watch import Watch
from lib_rocm_sd.several.blueprint import Blueprint, read
from lib_rocm_sd.several.replica import UNET, Manner

Fact = tuple[int, int | None, int]
"""A tensor's identity, version and place: another one where its values may be others."""


class Subject:
    """`module` and how it is computed. `hosts_own`: see blueprint.read. `part`: UNET or DECODER."""

    def __init__(
        self,
        module: nn.Module,
        manner: Callable[[], Manner],
        hosts_own: Sequence[str] = (),
        part: str = UNET,
    ) -> None:
        self.module, self.part = module, part
        self._manner, self._hosts_own = manner, hosts_own
        self.reasons: list[str] = []
        """Why there can be no copy of it now."""
        self.facts: list[Fact] = []
        """One fact per tensor, as last looked at."""
        self.leaves: list[nn.Module] = []
        """Modules with weights."""
        self.manner = manner()
        self._watch: Watch | None = None
        self._blueprint: Blueprint | None = None
        self._slots: list[tuple[dict[str, Any], str]] = []
        self._read_kinds: list[tuple[Hashable, ...]] = []
        self._around: tuple[Hashable, ...] = ()

    @property
    def blueprint(self) -> Blueprint:
        assert self._blueprint is not None
        return self._blueprint

    def look(self) -> None:
        """See what it is now; read again only what has changed."""
        self.manner, around = self._manner(), self._surroundings()
        same = self._watch is not None and self._watch.same() and around == self._around
        if same and not self.reasons:
            facts = self._facts()
            if facts == self.facts:
                return
            self.facts = facts
        if not same or self._kinds() != self._read_kinds:
            self._read()
            self._around = around
            self.facts = [] if self.reasons else self._facts()

    def _facts(self) -> list[Fact]:
        return [(id(t), version_of(t), t.data_ptr()) for t in self.tensors()]

    def _kinds(self) -> list[tuple[Hashable, ...]]:
        return [(t.dtype, t.shape) for t in self.tensors()]

    def tensors(self) -> list[torch.Tensor]:
        """Parameters and buffers as they are now, in the blueprint's order."""
        return [own[name] for own, name in self._slots]

    def _read(self) -> None:
        modules = list(self.module.modules())
        self.leaves = [m for m in modules if m._parameters.get("weight") is not None]
        self._slots = [
            (own, name)
            for module in modules
            for own in (module._parameters, module._buffers)
            for name, tensor in own.items()
            if tensor is not None
        ]
        self._read_kinds = self._kinds()
        blueprint, self.reasons = read(self.module, self._hosts_own, f"the {self.part}")
        if any(version_of(tensor) is None for tensor in self.tensors()):
            self.reasons.append("its weights were made in inference mode")
        if blueprint != self._blueprint:  # else the old one stays: it is known by identity
            self._blueprint = blueprint
        convs = [m for m in modules if isinstance(m, nn.Conv2d)]
        watched: list[tuple[dict[str, Any], str, Any]]
        watched = [(vars(m), key, vars(m).get(key)) for m in convs for key in CONV_SETTINGS]
        watched += [(vars(m), "training", m.training) for m in modules]
        self._watch = Watch(modules, watched)

    def _surroundings(self) -> tuple[Hashable, ...]:
        """What the module's own forward names beside those within."""
        home = sys.modules.get(type(self.module).__module__)
        return tuple(id(getattr(home, name, None)) for name in ("th", "timestep_embedding"))
