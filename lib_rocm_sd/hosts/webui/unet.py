"""The UNet in the WebUI: the blocks of the loaded checkpoint's, taken over while *UNet* is Auto.

They stay ours between generations, as attention does: to lay a UNet's convolution weights anew for
each picture would cost more than it gains. A hook of the script, or the step of a sampler, says
what holds from there on. Where that is Off, or the model another one, the blocks and the strides of
their weights are the WebUI's again.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from torch import nn

import lib_rocm_sd.hosts.read  # noqa: F401 - knows the hosts' classes
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.graphs.device import OFF
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.ui.options import UNET_MODES, Options
from lib_rocm_sd.hosts.webui import forge_unet, host, settings, state
from lib_rocm_sd.hosts.webui import session as a1111_session
from lib_rocm_sd.hosts.webui.unet_hook import WebUIHook
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM
from lib_rocm_sd.unet.hook import Hook
from lib_rocm_sd.unet.kinds import TITLES
from lib_rocm_sd.unet.parts import Block
from lib_rocm_sd.unet.takeover import KindReport, UnetTakeover

PART = "UNet"
"""Name of the part in the report's rows, like attention's."""
NO_CHECKPOINT = "no checkpoint is loaded"
UNKNOWN = "this checkpoint's UNet has no block of a known kind"
MOVED = "the UNet leaves the card after each use (--medvram, --lowvram)"
ANOTHERS = "the SD Unet in Settings > Stable Diffusion runs the steps"


class UnetSession:
    """Whose the blocks are, for this process. One UNet is taken over at a time."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._wish: Session | None = None
        self._unet: nn.Module | None = None
        self._taken: UnetTakeover | None = None
        self._by: Session | None = None
        self._hook: Hook | None = None
        self._hopeless: nn.Module | None = None
        self._begins: tuple[int, int] | None = None
        self._other_weights = False
        self.may_serve = False
        """Whether the last generation's settings and device are such that *UNet* decides."""
        self.trouble = ""
        """Why nothing was taken over where it was asked for; empty where something was."""
        self.rows: tuple[KindReport, ...] = ()
        """One report per kind of block, as last looked at; none where nothing is taken over."""

    def begin(self, turn: int = 0, steps: int = 1) -> None:
        """A generation of so many steps begins: what failed in the last one may be tried again.
        `turn` decides which blocks are compared with the WebUI's.
        """
        self._begins = turn, steps

    def establish(self, options: Options) -> None:
        """Make what `options` ask for hold from now on. Never raises."""
        self.may_serve = settings.current().unet and not _never()
        wished = options.enable and UNET_MODES[options.unet] and self.may_serve
        wished = wished and not refusals()
        with self._lock:
            self._wish = a1111_session.current().of_part(PART) if wished else None
            self._hold(host.loaded_model())

    def before_step(self, params: Any) -> None:
        """Callback of the sampler: the refiner may have become the model, also one that was loaded
        before, of which nobody tells.
        """
        unet = host.unet_of(host.loaded_model())
        if self._wish is not None and (unet is not self._unet or self._other_weights):
            with self._lock:
                self._hold(host.loaded_model())

    def model_loaded(self, model: Any) -> None:
        """Callback: the WebUI has another model, or other weights in the same. It may not be on the
        device yet: what that means is seen to by the next hook or step.
        """
        self._other_weights = True

    def end(self) -> None:
        """Leave the UNet as it is without us."""
        with self._lock:
            self._wish = None
            self._hold(None)

    def look(self) -> tuple[KindReport, ...]:
        """The blocks as they are now. Never raises."""
        with self._lock:
            try:
                taken = self._taken
                found = [] if taken is None or not taken.is_on else taken.report()
                self.rows = tuple(self._in_truth(row) for row in found)
            except Exception as error:
                self.rows, self.trouble = (), trouble.once(error)
            return self.rows

    def news(self) -> list[str]:
        """What comparisons of this generation found, for the note under the picture."""
        with self._lock:
            if self._taken is None:
                return []
            self._taken.spot.look(wait=True)
            found = dict.fromkeys(self._taken.spot.left.values())
        return [f"{why}. Steps before this was noticed may differ by as much" for why in found]

    def unrecorded(self) -> str:
        """Why blocks that are ours are launched one by one; empty where they are recorded."""
        why = "" if self._taken is None else self._taken.graphs.why_not(host.device())
        asked_for = settings.GRAPHS[settings.current().graphs] is not None
        return why if why != OFF or asked_for else f"{why}: {MOVED}"

    def _hold(self, model: Any) -> None:
        """Let the blocks be whose they are to be. Whatever goes wrong leaves them to the WebUI."""
        begins, self._begins = self._begins, None
        unet = host.unet_of(model)
        if begins is not None or self._wish is None or unet is not self._hopeless:
            self.trouble, self._hopeless = "", None
        try:
            self._held(model, unet, begins)
            self.look()
        except Exception as error:
            self.trouble, self._hopeless = f"ours failed: {trouble.once(error)}", unet
            self._give_back_all_the_same()

    def _held(self, model: Any, unet: nn.Module | None, begins: tuple[int, int] | None) -> None:
        if self._unet is not None and not self._fits(unet):
            self._give_back()
        if self._wish is None or (unet is not None and unet is self._hopeless):
            return
        self.trouble = obstacle(unet)
        if unet is None or self.trouble:
            self._give_back()
        elif self._taken is None:
            self._take(model, unet, self._wish)
        elif begins is not None:
            self._taken.take_over(anew=False)
        if self._taken is not None and begins is not None:
            self._taken.generation_begins(*begins)
        if isinstance(self._taken, forge_unet.ForgeTakeover):
            self._taken.renewed()
        if self._taken is not None and not self._taken.stand_ins:
            self.trouble = UNKNOWN

    def _take(self, model: Any, unet: nn.Module, wish: Session) -> None:
        ours = state.optimizer()

        def aside() -> bool:
            return ours is None or ours.stands_aside

        self._unet, self._by, self._other_weights = unet, wish, False
        if host.forge() is not None:
            of_forge = forge_unet.take_over(model, wish, aside)
            self._hook, self._taken = of_forge.hook, of_forge
        else:
            self._hook = WebUIHook(aside)
            self._taken = UnetTakeover([unet], wish, self._hook)
        self._taken.take_over()

    def _fits(self, unet: nn.Module | None) -> bool:
        """Whether what is taken over may stay so. Other weights may have another dtype."""
        same = unet is self._unet and self._wish is self._by
        if self._taken is not None and self._hook is not None:
            same = same and self._taken.graphs.wish == self._hook.graphs
        return same and self._taken is not None and self._taken.is_on and not self._other_weights

    def _give_back(self) -> None:
        """Forgotten only when all of it is back: short of memory, the rest is given back later."""
        if self._taken is not None:
            self._taken.give_back()
        self._taken = self._unet = self._by = self._hook = None
        self.rows = ()

    def _give_back_all_the_same(self) -> None:
        try:
            self._give_back()
        except Exception as error:
            trouble.once(error)

    def _in_truth(self, row: KindReport) -> KindReport:
        """With what the hook says of all calls of blocks, or of attention, at the moment."""
        assert self._taken is not None and self._hook is not None
        why = self._hook.ready(())
        if why and row.ours:
            return replace(row, ours=0, left={**row.left, why: row.ours}, partly={})
        parts = (stand_in.reading.parts for stand_in in self._taken.stand_ins)
        module = next((part.attn1 for part in parts if isinstance(part, Block)), None)
        if row.kind != TITLES[2] or module is None:
            return row
        why = self._hook.attention(module)
        return replace(row, partly={**row.partly, why: row.ours}) if why and row.ours else row


def obstacle(unet: nn.Module | None) -> str:
    """Why no block can be taken over now; empty where some can."""
    if unet is None:
        return NO_CHECKPOINT
    if host.attribute("modules.sd_unet", "current_unet") is not None:
        return ANOTHERS
    return ""


def refusals() -> list[str]:
    """Why our kernels cannot compute blocks here, by the one that each level launches in each of
    them; compiles and tests at the first use.
    """
    try:
        device = host.device()
        if not identify(device).reasons:
            host.say_once("checking the UNet's kernels; the first use of each compiles it")
        return engine.usable(device, LAYER_NORM)
    except Exception as error:
        return [trouble.once(error)]


def _never() -> bool:
    """Whether nothing of ours can run here, whatever is compiled and tested."""
    try:
        return bool(host.shortcomings() or identify(host.device()).reasons)
    except Exception as error:
        trouble.once(error)
        return True


def why_not(options: Options) -> list[str]:
    """Why no block will be ours in a picture that is made with `options`; empty if some may be."""
    if not options.enable:
        return ["Enable is off"]
    if not UNET_MODES[options.unet]:
        return ["UNet is Off"]
    if not settings.current().unet:
        return ["Settings > ROCm SD excludes the UNet's blocks"]
    return refusals() or ([session.trouble] if session.trouble else [])


def explained(reason: str) -> str:
    """A reason why a block is the WebUI's, with the flag or the setting that brings it about."""
    if host.forge() is not None:
        return reason
    flags: Any = host.attribute("modules.shared", "cmd_opts")
    if "float8" in reason:
        return f"{reason} by Settings > Optimizations > FP8 weight"
    if not reason.endswith("float32"):
        return reason
    for flag in ("no_half", "upcast_sampling"):
        if getattr(flags, flag, False):
            return f"{reason} by --{flag.replace('_', '-')}"
    return reason


def counted(rows: tuple[KindReport, ...]) -> tuple[int, int]:
    """How many blocks are ours, and how many there are."""
    return sum(row.ours for row in rows), sum(row.total for row in rows)


session = UnetSession()
"""The session of the process; survives "Reload UI"."""


def model_loaded(model: Any) -> None:
    """Callback: a checkpoint was loaded, maybe amid a generation."""
    session.model_loaded(model)


def before_step(params: Any) -> None:
    """Callback: a sampler is about to call the UNet."""
    session.before_step(params)
