"""A VAE whose decoder and encoder are ours: a copy, the given one stays as it is.

The copy shares all with the given VAE but `first_stage_model`, in whose place it has something that
passes everything on, and ComfyUI's two estimates of memory. Read in Comfy-Org/ComfyUI a125cd84
(0.3.64): comfy/sd.py, class VAE; comfy/ldm/models/autoencoder.py.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.comfyui import host
from lib_rocm_sd.hosts.comfyui.coder import Coder, VaeWish
from lib_rocm_sd.hosts.comfyui.model import WITHOUT, is_dynamic
from lib_rocm_sd.hosts.comfyui.tally import tally
from lib_rocm_sd.vae.bands import Interrupted
from lib_rocm_sd.vae.program import PARTS

ESTIMATES = {"decoder": "memory_used_decode", "encoder": "memory_used_encode"}

_lock = threading.RLock()
_coders: weakref.WeakKeyDictionary[nn.Module, dict[str, Coder]] = weakref.WeakKeyDictionary()


class FirstStage:
    """In the place of a VAE's first_stage_model: passes everything on to it, two calls in our way.

    Its decoder's and encoder's forward are ours only while one of these calls runs. A deep copy has
    a copy of the model, and is asked for the same.
    """

    def __init__(self, model: nn.Module, wish: VaeWish) -> None:
        self.rocm_sd_model = model
        self.rocm_sd_wish = wish

    def __getattr__(self, name: str) -> Any:
        if name in ("rocm_sd_model", "rocm_sd_wish"):
            raise AttributeError(name)  # of one that is being copied
        return getattr(self.rocm_sd_model, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> FirstStage:
        return FirstStage(copy.deepcopy(self.rocm_sd_model, memo), self.rocm_sd_wish)

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        return self._by("decoder", self.rocm_sd_model.decode, *args, **kwargs)

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        return self._by("encoder", self.rocm_sd_model.encode, *args, **kwargs)

    def _by(self, role: str, theirs: Any, *args: Any, **kwargs: Any) -> Any:
        with _lock:
            coder = coder_of(self.rocm_sd_model, role, self.rocm_sd_wish)
            if coder is None:
                return theirs(*args, **kwargs)
            coder.begin(self.rocm_sd_wish)
            try:
                return theirs(*args, **kwargs)
            except Interrupted:
                host.stop_if_interrupted()
            except host.Cancelled as cancelled:
                raise cancelled.error from None
            except (RuntimeError, MemoryError) as error:
                kind = host.out_of_memory()
                if isinstance(error, kind) or not is_out_of_memory(error):
                    raise
                raise kind(str(error)) from None
            finally:
                coder.end()
        return theirs(*args, **kwargs)


@dataclass
class Estimate:
    """ComfyUI's estimate of one image's memory, or ours, if that is less and ours will run.

    A deep copy is of the copied model.
    """

    rocm_sd_own: Callable[[Any, Any], float]
    model: nn.Module
    role: str
    wish: VaeWish
    device: Any

    def __call__(self, shape: Any, dtype: Any) -> float:
        theirs = self.rocm_sd_own(shape, dtype)
        try:
            ours = self._needed(shape, dtype)
        except Exception as error:
            why = f"its memory cannot be foreseen: {trouble.once(error)}"
            tally.leave(PARTS[self.role], why)
            return theirs
        return theirs if ours is None else min(theirs, ours)

    def _needed(self, shape: Any, dtype: Any) -> int | None:
        """None where ours will not run."""
        coder = coder_of(self.model, self.role, self.wish)
        if coder is None or len(shape) != 4 or not isinstance(self.device, torch.device):
            return None
        if coder.was_left or coder.unfit(dtype, self.device):
            return None
        return coder.needed_bytes(int(shape[2]), int(shape[3]), dtype, self.device, self.wish)


def with_ours(vae: Any, wish: VaeWish) -> Any:
    """A copy of `vae`, a comfy.sd.VAE, that decodes and encodes as `wish` says.

    What fails gives the VAE as it came, with a reason.
    """
    try:
        model = given(getattr(vae, "first_stage_model", None))
        if not isinstance(model, nn.Module):
            return vae
        made = copy.copy(vae)
        equip(made, model, wish)
    except Exception as error:
        tally.leave("VAE", f"the node failed: {trouble.once(error)}")
        return vae
    return made


def equip(vae: Any, model: nn.Module, wish: VaeWish) -> None:
    """Let a VAE, whose model is `model`, decode and encode as `wish` says from now on.

    One that DynamicVRAM loads brings its weights in each call, and its class loads it in no other
    way: Comfy-Org/ComfyUI 033046cc (0.38), comfy/sd.py, class VAE.
    """
    if is_dynamic(getattr(vae, "patcher", None)):
        tally.leave("VAE", f"DynamicVRAM brings its weights in each call; {WITHOUT}")
    device = getattr(vae, "device", None)
    own = {name: _own(getattr(vae, name)) for name in ESTIMATES.values()}
    estimates = {
        name: Estimate(own[name], model, role, wish, device) for role, name in ESTIMATES.items()
    }
    vae.first_stage_model = FirstStage(model, wish)
    for name, estimate in estimates.items():
        setattr(vae, name, estimate)


def _own(estimate: Any) -> Any:
    """ComfyUI's, of an estimate that may be ours."""
    return estimate.rocm_sd_own if isinstance(estimate, Estimate) else estimate


def given(model: Any) -> Any:
    """What ComfyUI made, of a first_stage_model that may be ours."""
    return model.rocm_sd_model if isinstance(model, FirstStage) else model


def coder_of(model: nn.Module, role: str, wish: VaeWish) -> Coder | None:
    """The one of a model; None where the role is not ours to run, or cannot be looked at."""
    module = getattr(model, role, None)
    if role not in wish.roles or not isinstance(module, nn.Module):
        return None
    known = _coders.setdefault(model, {})
    if role not in known or known[role].module is not module:
        try:
            known[role] = Coder(module, role)
        except Exception as error:
            tally.leave(PARTS[role], f"it cannot be read: {trouble.once(error)}")
            return None
    return known[role]
