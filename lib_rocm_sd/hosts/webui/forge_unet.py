"""A Forge's UNet, whose blocks become ours while *UNet* is Auto.

All clones of a Forge's model share its modules, and what a call asks for beside its input comes
with its options. Forge merges LoRA into parameters, moves them, and makes layers cast in each call,
all of it before a sampler's first step. A block is looked at before each call, so what changed is
noticed; where only values may have, the UNet's own call tells.

Read in lllyasviel/stable-diffusion-webui-forge dfdcbab6: backend/sampling/sampling_function.py,
backend/patcher/lora.py, backend/memory_management.py; and in
Panchovix/stable-diffusion-webui-reForge 3b56b268 and Haoming02/sd-webui-forge-classic 1f95d717:
ldm_patched/modules/model_patcher.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

from torch import nn

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.strides import Strides
from lib_rocm_sd.hosts.webui import host, kinds, settings
from lib_rocm_sd.hosts.webui.functions import Function
from lib_rocm_sd.modules.patches import named
from lib_rocm_sd.unet.hook import Hook
from lib_rocm_sd.unet.takeover import UnetTakeover

_UNKNOWN = object()


class ForgeHook(Hook):
    """A Forge computes under inference mode, with models that it may never set to evaluation.

    Blocks are ours amid calls of their UNet, in the threads that make one.
    """

    rests = tells = spares = True

    def __init__(self, stands_aside: Callable[[], bool]) -> None:
        self._stands_aside = stands_aside
        self._threads = threading.local()

    def enter(self, ours: bool) -> None:
        """A call of the UNet begins in this thread, whose blocks may be `ours`."""
        self._calls.append(ours)

    def leave(self) -> None:
        """The call that has begun last in this thread ends."""
        del self._calls[-1:]

    @property
    def _calls(self) -> list[bool]:
        if not hasattr(self._threads, "calls"):
            self._threads.calls = []
        found: list[bool] = self._threads.calls
        return found

    def serves(self) -> bool:
        calls = self._calls
        return bool(calls) and calls[-1]

    @property
    def compares(self) -> bool:
        return settings.current().spot_check and super().compares

    @property
    def graphs(self) -> bool | None:
        return settings.GRAPHS[settings.current().graphs]

    def attention(self, module: nn.Module) -> str:
        if self._stands_aside():
            return "attention is the WebUI's own"
        other = _another(module)
        return "" if other is None else f"{named(other)} has replaced the WebUI's attention"


class ForgeTakeover(UnetTakeover):
    """Blocks of `model.diffusion_model`, until `give_back`."""

    def __init__(self, model: Any, session: Session, stands_aside: Callable[[], bool]) -> None:
        unet = model.diffusion_model
        self.hook = ForgeHook(stands_aside)
        super().__init__([unet], session, self.hook)
        self._unet, self._model = ref(unet), ref(model)
        self._strides = Strides(model, unet, _backup)
        self._handles: list[Any] = []
        self._values: Any = _UNKNOWN

    def take_over(self, anew: bool = True) -> None:
        super().take_over(anew)
        unet = self._unet()
        if unet is not None and self.stand_ins and not self._handles:
            self._handles = [
                unet.register_forward_pre_hook(self._begins),
                unet.register_forward_hook(self._ends, always_call=True),
            ]

    def renewed(self) -> None:
        """A sampler may begin: weights may be others by its first step."""
        self._values = _UNKNOWN

    def give_back(self) -> None:
        """Leave the UNet as it is without us. What fails is done again when asked again."""
        while self._handles:
            self._handles.pop().remove()
        super().give_back()
        self._strides.give_back()

    def _begins(self, module: nn.Module, given: Any) -> None:
        """Before each call of the UNet. Never raises."""
        ours = False
        try:
            values = values_of(self._model())
            if values is None or values != self._values:
                super().take_over(anew=False)
                self.weights_changed()
            self._values = values
            self.step_begins()
            ours = True
        except Exception as error:
            host.say_once(f"the UNet's blocks are the WebUI's: {trouble.once(error)}")
        self.hook.enter(ours)

    def _ends(self, module: nn.Module, given: Any, made: Any) -> None:
        self.hook.leave()


def _backup(model: Any) -> Mapping[str, Any]:
    """The parameters of a model that a LoRA has taken the place of."""
    owners = (getattr(model, "lora_loader", None), *kinds.patchers_of(model))
    found = (getattr(owner, "backup", None) for owner in owners)
    return next((each for each in found if isinstance(each, Mapping) and each), {})


def values_of(model: Any) -> Any:
    """Equal only while no other values were put into the weights, amid a sampler's steps; None
    where they might in each.
    """
    patcher = getattr(model, "current_patcher", None)
    if getattr(patcher, "current_hooks", None) or getattr(patcher, "hook_backup", None):
        return None
    loader = getattr(model, "lora_loader", None)
    names = ("current_weight_patches_uuid", "model_loaded_weight_memory", "lowvram_patch_counter")
    return (getattr(loader, "loaded_hash", None), *(getattr(model, name, None) for name in names))


def _another(attention: nn.Module) -> Any:
    """Whose function it is that this attention calls, where ours is not in its place."""
    kind = kinds.find()
    names = getattr(type(attention).forward, "__globals__", {})
    if kind is None:
        return None
    bound = (names[name] for name in kind.packed if name in names)
    return next((each for each in bound if not isinstance(each, Function)), None)


def take_over(model: Any, session: Session, stands_aside: Callable[[], bool]) -> ForgeTakeover:
    """A take-over of a Forge's loaded model, not begun. TypeError if the model is not as known."""
    made = getattr(kinds.unet_patcher_of(model), "model", None)
    if not isinstance(made, nn.Module):
        raise TypeError("this Forge's model has no patcher of its UNet")
    return ForgeTakeover(made, session, stands_aside)
