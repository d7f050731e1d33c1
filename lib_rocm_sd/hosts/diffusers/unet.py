"""Diffusers' UNet: its blocks run as our programs, each for itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import lib_rocm_sd.hosts.read  # noqa: F401 - knows the hosts' classes
from lib_rocm_sd.engine.engine import engine, is_compiling
from lib_rocm_sd.engine.session import DEFAULT, Session
from lib_rocm_sd.hosts.timed import Hook as Hooked
from lib_rocm_sd.modules.stand_in import StandIn
from lib_rocm_sd.modules.watch import Watch
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM
from lib_rocm_sd.unet.hook import Hook
from lib_rocm_sd.unet.merged import hosts_weight
from lib_rocm_sd.unet.takeover import KindReport, UnetTakeover, take_over

HOOKED = "_diffusers_hook"
"""What a model gets whose calls diffusers' hooks see: those of group offloading copy weights of the
modules that come next on another stream. Prompts and time embeddings of all blocks are made by the
first, which would read them too soon. Read in diffusers 0.42.1, hooks/hooks.py.
"""
PROCESSOR = "processor"
"""The attribute of an attention layer of diffusers that says what it runs."""
KNOWN = ("accelerate.", "diffusers.", "peft.", "torch.")
"""Packages whose forwards write to no adapter amid a call of the model."""


@dataclass(frozen=True)
class UnetPatch:
    """What became of the blocks of a UNet, or of a ControlNet; `takeover` is None where there was
    nothing to take over.
    """

    takeover: UnetTakeover | None = None

    def rows(self) -> list[KindReport]:
        """For each kind of block how many are ours now, and why the others are not."""
        return [] if self.takeover is None else self.takeover.report()


class DiffusersHook(Hook):
    """A patient `session` waits until the gate has decided whether blocks can be ours at all."""

    def __init__(self, session: Session, unet: nn.Module) -> None:
        self._session, self._attributes = session, vars(unet)
        self._usable: set[torch.device] = {torch.device("cpu")}

    def ready(self, leaves: Sequence[nn.Module]) -> str:
        if getattr(self._attributes.get(HOOKED), "hooks", None):
            return "diffusers brings its weights when they are needed (group offloading)"
        weight = hosts_weight(leaves[0])
        if weight is None or weight.device in self._usable:
            return ""
        device = weight.device
        why = engine.known(device, LAYER_NORM)
        if why is None or (self._session.patient and engine.waits(device, LAYER_NORM)):
            why = engine.usable(device, LAYER_NORM, self._session)
        if not why:
            self._usable.add(device)
        return "; ".join(why)


@contextmanager
def patched_unet(
    unet: nn.Module, session: Session = DEFAULT, part: str = "UNet"
) -> Iterator[UnetPatch]:
    """Run the blocks of `unet` as our programs inside the `with` block, by rows `part`."""
    taken = take_over(unet, session.of_part(part), DiffusersHook(session, unet))
    rows = taken.report()
    if not rows:  # it may also be what hooks are not for, as a script of TorchScript is
        yield UnetPatch()
        return
    left = [(row.kind, *why) for row in rows for why in row.left.items()]
    if left:
        told = ", ".join(f"{count} x {kind} ({why})" for kind, why, count in left)
        session.report.event(f"diffusers: blocks of the {part} left alone: {told}")
    begins = unet.register_forward_pre_hook(Hooked(partial(_step_begins, taken, _Around(unet))))
    ends = unet.register_forward_hook(Hooked(partial(_step_ends, taken)), always_call=True)
    try:
        yield UnetPatch(taken)
    finally:
        begins.remove()
        ends.remove()
        taken.give_back()


class _Around:
    """Tells whether a call of a model runs only code that is known to write to no adapter, but for
    what blocks of ours call.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._watch: Watch | None = None
        self._is_known = False

    def is_known(self) -> bool:
        own = vars(self._model).get("forward")
        if own is not None and not _is_known(own):
            return False
        if self._watch is None or not self._watch.same():
            found = dict(_outside(self._model))
            theirs = [each for each, is_block in found.items() if not is_block]
            chosen = [(vars(each), PROCESSOR, vars(each).get(PROCESSOR)) for each in theirs]
            processors = {each.__class__ for *_, each in chosen if each is not None}  # of ours, too
            classes: set[Any] = {type(self._model), *map(type, theirs)}
            calls = [(each, "__call__") for each in processors]
            self._watch = Watch([self._model, *found], chosen, calls)
            self._is_known = (
                not any(each._forward_hooks or each._forward_pre_hooks for each in found)
                and not any("forward" in vars(each) for each in theirs)
                and all(_is_known(each.forward) for each in classes)
                and all(_is_known(each.__call__) for each in classes | processors)
            )
        return self._is_known


def _outside(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """The modules within that lie in no block of ours; True for the blocks themselves."""
    for child in filter(None, module._modules.values()):
        forward = vars(child).get("forward")
        is_block = isinstance(forward, StandIn) and forward.is_put_in
        yield child, is_block
        if not is_block:
            yield from _outside(child)


def _is_known(forward: Any) -> bool:
    """Whether it, and what it wraps, is of these packages. accelerate's is a partial."""
    while forward is not None:
        table = getattr(getattr(forward, "func", forward), "__globals__", {})
        if not str(table.get("__name__")).startswith(KNOWN):
            return False
        forward = getattr(forward, "__wrapped__", None)
    return True


def _step_begins(taken: UnetTakeover, around: _Around, *_: Any) -> None:
    if not is_compiling():
        taken.step_begins(around.is_known)


def _step_ends(taken: UnetTakeover, *_: Any) -> None:
    if not is_compiling():
        taken.step_ends()
