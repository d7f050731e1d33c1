"""Kinds of blocks of a UNet, and one of them as it was read. Who can read a host's says so here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lib_rocm_sd.calls import Calls
from lib_rocm_sd.modules.watch import Watch
from lib_rocm_sd.unet import blocks
from lib_rocm_sd.unet.parts import Parts
from lib_rocm_sd.unet.weights import Slots


@dataclass(frozen=True, eq=False)
class Reading:
    """A module as it was read: its parts, or the reasons why not. `partly`: why modules within are
    called as they are. `leaves`: those whose parameters we read where they lie, which are in
    `slots`; `lasts`: no others are read.
    """

    parts: Parts | None
    reasons: tuple[str, ...]
    partly: tuple[str, ...]
    leaves: tuple[nn.Module, ...]
    watch: Watch
    slots: Slots = ((), ())
    lasts: bool = True


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of block as one family of hosts has it.

    `read(module, hosts_own, told)` gives the module as it is now; `hosts_own` and `told` as Hook
    has them (`tells`). `bind(module, *args, **kwargs)` gives what a call asks for, None if it is
    not for us, an UnknownModuleError where the report is to say why, a TypeError for arguments that
    are not known, another error where they are not what they should be; `run` computes it.
    """

    title: str
    read: Callable[[nn.Module, Iterable[str], bool], Reading]
    bind: Callable[..., Any]
    run: Callable[[Any, Any, blocks.Means, Calls], Any]


TITLES = (
    "residual block",
    "transformer",
    "transformer block",
    "upsampling",
    "downsampling",
    "first and last layers",
    "residual block over frames",
    "image attention",
    "joint transformer block",
    "single transformer block",
)
Find = Callable[[nn.Module], list[tuple[nn.Module, Kind]]]
"""Gives the blocks of a UNet, each with its kind, in the UNet's own order."""
_finds: list[Find] = []


def register(find: Find) -> None:
    """Let `find` look for blocks: hosts/read does so when it is imported."""
    _finds[:] = [find]


def found_in(model: nn.Module) -> list[tuple[nn.Module, Kind]]:
    """The blocks of a UNet, each with its kind. RuntimeError where nobody can read a UNet."""
    if not _finds:
        raise RuntimeError("no UNet can be read: lib_rocm_sd.hosts.read was not imported")
    return _finds[0](model)
