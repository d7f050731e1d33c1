"""The VAE in the WebUI: its decoder and encoder run as our program while a generation of ours runs.

The seam is `forward` of first_stage_model.decoder and .encoder, on the instances: everything that
decodes or encodes in full passes there (pictures, hires fix, previews by the "Full" method,
img2img, inpainting; SD1, SD2, SDXL, SD3), and neither TAESD nor the cheap previews do.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import nn

from lib_rocm_sd import policy
from lib_rocm_sd.cards.decoding import SeveralProgram
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.ui.options import VAE_MODES, Options
from lib_rocm_sd.hosts.webui import host, settings
from lib_rocm_sd.hosts.webui.coder import CoderStandIn, Lend, Turn, VaeWish, float32_reason
from lib_rocm_sd.hosts.webui.estimates import Estimates
from lib_rocm_sd.ops.conv.op import CONVS

_ROLES = ("decoder", "encoder")


def alone(program: SeveralProgram) -> None:
    """Lends no card."""


class VaeSession:
    """Who runs the VAE, for this process. Its coders live as long as the WebUI's VAE does."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._coders: weakref.WeakKeyDictionary[nn.Module, tuple[CoderStandIn, ...]]
        self._coders = weakref.WeakKeyDictionary()
        self._estimates = Estimates()
        self._wish: VaeWish | None = None
        self._told: set[str] = set()
        self.turn = Turn()
        self.lend: Lend = alone
        """See CoderStandIn; set by those who have other cards."""
        self.can_serve = False
        """Whether our kernels could run a VAE here, as of the last `establish`."""

    def begin(self) -> None:
        """A generation begins: forget what the last one did."""
        self.turn = Turn()

    def establish(self, options: Options) -> None:
        """Make what `options` ask for hold from now on, for the generation of this thread."""
        wish = wish_of(options)
        allowed = any(settings.current().vae(role) for role in _ROLES)
        asked = options.enable and allowed and not host.shortcomings()
        self.can_serve = asked and not refusals()
        with self._lock:
            self._release_stale()
            self._wish = wish if self.can_serve else None
            self.turn.thread = threading.get_ident()
            if self._wish is None:
                self._take_out()
            else:
                self._put_into(host.loaded_model(), self._wish)

    def end(self) -> None:
        """Leave the WebUI's VAE as it is without us."""
        with self._lock:
            wish, self._wish = self._wish, None
            self._take_out()
            self._release_stale()
            if wish is not None and wish.gives_back:
                for coder in self._all():
                    coder.release()

    def news(self) -> list[str]:
        """What went otherwise than asked in this generation, and has not been told before."""
        found = [message for message in self.turn.left if message not in self._told]
        self._told.update(found)
        return found

    def model_loaded(self, model: Any) -> None:
        """The WebUI has another model from now on, or the same with another VAE."""
        with self._lock:
            self._release_stale()
            if self._wish is not None:
                self._put_into(model, self._wish)

    def _put_into(self, model: Any, wish: VaeWish) -> None:
        vae = host.vae_of(model)
        if not isinstance(vae, nn.Module):
            return
        known = self._coders.get(vae, ())
        modules = [getattr(vae, role, None) for role in _ROLES]
        if [coder.module for coder in known] != [m for m in modules if isinstance(m, nn.Module)]:
            for coder in known:
                coder.take_out()
            known = tuple(
                CoderStandIn(module, role, lambda program: self.lend(program))
                for module, role in zip(modules, _ROLES, strict=True)
                if isinstance(module, nn.Module)
            )
            self._coders[vae] = known
        for coder in known:
            if settings.current().vae(coder.role):
                coder.serve_from(wish, self.turn)
            else:
                coder.take_out()
        self._estimates.put(model, known)

    def _take_out(self) -> None:
        self._estimates.take()
        for coder in self._all():
            coder.take_out()

    def _release_stale(self) -> None:
        """A checkpoint that the WebUI keeps in main memory keeps nothing of ours on the GPU."""
        for coder in self._all():
            coder.release_stale()

    def _all(self) -> list[CoderStandIn]:
        return [coder for coders in self._coders.values() for coder in coders]


def wish_of(options: Options) -> VaeWish | None:
    """What the options ask of the VAE; None for nothing."""
    mode = VAE_MODES[options.vae] if options.enable else ""
    if not mode:
        return None
    return VaeWish(mode, options.budget_mib << 20 or None, options.level == policy.MEMORY.name)


def refusals() -> list[str]:
    """Why our kernels cannot run a VAE on this machine; compiles and tests at the first use."""
    try:
        device = host.device()
        if not identify(device).reasons:
            host.say_once("checking the VAE's kernels; the first use of each compiles it")
        return engine.usable(device, CONVS["3x3"])
    except Exception as error:
        return [trouble.once(error)]


def why_not() -> list[str]:
    """Why no VAE can be run on this machine as the WebUI is now; empty where one can."""
    why = refusals()
    if not why and host.vae_dtype() == torch.float32:
        return [float32_reason()]
    return why


def status() -> str:
    """A sentence or two for people; empty where the device is not ours anyway."""
    if identify(host.device()).reasons:
        return ""
    why = why_not()
    if why:
        return f"The WebUI's own code runs the VAE: {why[0]}."
    trouble = " ".join(f"Last time {message}." for message in session.turn.left)
    return f"The VAE runs on our kernels. {trouble}".strip()


session = VaeSession()
"""The session of the process; survives "Reload UI"."""


def model_loaded(model: Any) -> None:
    """Callback: a checkpoint or a VAE was loaded, maybe amid a generation."""
    session.model_loaded(model)
