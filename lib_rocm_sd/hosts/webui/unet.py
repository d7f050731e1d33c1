"""The UNet in the WebUI: the blocks of the loaded checkpoint's, taken over while *UNet* is Auto.

They stay ours between generations, as attention does: to lay a UNet's convolution weights anew for
each picture would cost more than it gains. A hook of the script, or the step of a sampler, says
what holds from there on. Where that is Off, or the model another one, the blocks and the strides of
their weights are the WebUI's again.

All clones of a Forge's model share its modules, and what a call asks for beside its input comes
with its options. Forge merges LoRA into parameters, moves them, and makes layers cast in each call,
all of it before a sampler's first step. A block is looked at before each call, so what changed is
noticed; where only values may have, the UNet's own call tells. Read in
lllyasviel/stable-diffusion-webui-forge dfdcbab6: backend/sampling/sampling_function.py,
backend/patcher/lora.py, backend/memory_management.py; and in
Panchovix/stable-diffusion-webui-reForge 3b56b268 and Haoming02/sd-webui-forge-classic 1f95d717:
ldm_patched/modules/model_patcher.py.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

from torch import nn

import lib_rocm_sd.hosts.read  # noqa: F401 - knows the hosts' classes
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.graphs.device import OFF
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.strides import Strides, values_of
from lib_rocm_sd.hosts.ui.options import UNET_MODES, Options
from lib_rocm_sd.hosts.ui.status import CONTROLNET
from lib_rocm_sd.hosts.webui import host, settings
from lib_rocm_sd.hosts.webui import session as a1111_session
from lib_rocm_sd.hosts.webui.attention import Function
from lib_rocm_sd.hosts.webui.controlnets import ControlNets, models_of
from lib_rocm_sd.hosts.webui.faster import TimedUnet
from lib_rocm_sd.hosts.webui.seams import optimizer
from lib_rocm_sd.modules.patches import named
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
NETWORKS = "networks"
"""The module of the WebUI's extension Lora, as its own scripts import it."""
_APPLIED = "network_current_names"
"""What a layer notes of the networks that are applied to it."""
_NAME = "network_layer_name"
_FUNCTIONAL = "networks are computed in the layers' forwards (lora_functional)"
_UNKNOWN = object()


class SettingsHook(Hook):
    """What the settings say. `stands_aside()`: whether attention is the WebUI's own now."""

    def __init__(self, stands_aside: Callable[[], bool]) -> None:
        self.stands_aside = stands_aside

    @property
    def compares(self) -> bool:
        return settings.current().spot_check and super().compares

    @property
    def graphs(self) -> bool | None:
        return settings.GRAPHS[settings.current().graphs]

    def attention(self, module: nn.Module) -> str:
        return "attention is the WebUI's own" if self.stands_aside() else ""


class WebUIHook(SettingsHook):
    """What AUTOMATIC1111's WebUI and its AMD fork are asked before a block runs: networks (LoRA),
    hypernetworks, upcast.

    The WebUI applies networks in the forwards of Linear, Conv2d, GroupNorm and LayerNorm, which
    blocks of ours do not call: `network_apply_weights` of its Lora extension is called on each
    layer instead.
    """

    hosts_own = ("modules.sd_hijack_utils",)
    """Its CondFunc: SpatialTransformer, GroupNorm32 and GEGLU without copies, or in float32."""

    def __init__(self, stands_aside: Callable[[], bool] = lambda: False) -> None:
        super().__init__(stands_aside)
        self._shared: Any = host.module("modules.shared")

    @property
    def graphs(self) -> bool | None:
        """What graphs keep would stay on the card while the WebUI moves the UNet out of it."""
        wish = super().graphs
        return False if wish is None and host.is_short_of_memory() else wish

    def ready(self, leaves: Sequence[nn.Module]) -> str:
        """Apply the wanted networks where others are applied; or why the WebUI has to."""
        networks: Any = sys.modules.get(NETWORKS)
        loaded = getattr(networks, "loaded_networks", None)
        apply = getattr(networks, "network_apply_weights", None)
        if loaded is None or apply is None:
            return ""
        if getattr(self._shared.opts, "lora_functional", False):
            # The layers' forwards touch no weight then where nothing is loaded, nor do we.
            return _FUNCTIONAL if loaded else ""
        try:
            wanted = tuple((n.name, n.te_multiplier, n.unet_multiplier, n.dyn_dim) for n in loaded)
        except AttributeError:
            return "this WebUI's networks are not of a known kind"
        stale = [leaf for leaf in leaves if leaf.__dict__.get(_APPLIED, ()) != wanted]
        try:
            for leaf in stale:
                apply(leaf)
        except Exception as error:
            return f"networks could not be applied: {type(error).__name__}: {error}"
        if any(vars(leaf).get(_APPLIED, ()) != wanted for leaf in stale if _NAME in vars(leaf)):
            return "this WebUI notes applied networks in a way that is not known"
        return ""

    def attention(self, module: nn.Module) -> str:
        why = super().attention(module)
        if not why and getattr(self._shared, "loaded_hypernetworks", None):
            why = "a hypernetwork is loaded"
        if not why and getattr(self._shared.opts, "upcast_attn", False):
            why = "attention is computed in float32"
        return why


class ForgeHook(SettingsHook):
    """A Forge computes under inference mode, with models that it may never set to evaluation.

    Blocks are ours amid calls of their UNet, in the threads that make one.
    """

    rests = tells = spares = True

    def __init__(self, stands_aside: Callable[[], bool]) -> None:
        super().__init__(stands_aside)
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

    def attention(self, module: nn.Module) -> str:
        """Also where another function than ours is what it calls."""
        why, kind = super().attention(module), host.find()
        if why or kind is None:
            return why
        names = getattr(type(module).forward, "__globals__", {})
        bound = (names[name] for name in kind.packed if name in names)
        other = next((each for each in bound if not isinstance(each, Function)), None)
        return "" if other is None else f"{named(other)} has replaced the WebUI's attention"


class ForgeTakeover(UnetTakeover):
    """Blocks of `unet`, until `give_back`. Its host patches `model`, which has it or is it."""

    def __init__(
        self, unet: nn.Module, model: Any, session: Session, stands_aside: Callable[[], bool]
    ) -> None:
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
                unet.register_forward_pre_hook(lambda *given: self.call_begins()),
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

    def call_begins(self) -> None:
        """Before each call of the UNet. Never raises. Hooks that are removed amid it run once more,
        and those that are added do not.
        """
        if not self._handles:
            return
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
    owners = (getattr(model, "lora_loader", None), *host.patchers_of(model))
    found = (getattr(owner, "backup", None) for owner in owners)
    return next((each for each in found if isinstance(each, Mapping) and each), {})


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
        self._moment = (0, 1)
        self._controlnets = ControlNets()
        self.timed = TimedUnet(self._switch, self._setting)
        self._other_weights = False
        self.may_serve = False
        """Whether the last generation's settings and device are such that *UNet* decides."""
        self.trouble = ""
        """Why nothing was taken over where it was asked for; empty where something was."""
        self.rows: tuple[KindReport, ...] = ()
        """One report per kind of block, as last looked at; none where nothing is taken over."""
        self.controlnets: tuple[KindReport, ...] = ()
        """The same of ControlNets."""

    def begin(self, turn: int = 0, steps: int = 1) -> None:
        """A generation of so many steps begins: what failed in the last one may be tried again.
        `turn` decides which blocks are compared with the WebUI's.
        """
        self.timed.rest()
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
        models = models_of(params, host.patcher_of(host.loaded_model(), "unet"))
        self.timed.step_begins(unet if self._wish is not None else None, params, not models)
        if self._wish is not None and (unet is not self._unet or self._other_weights):
            with self._lock:
                self._hold(host.loaded_model())
        if models and self._taken is not None:
            with self._lock:
                self._hold_controlnets(models)

    def model_loaded(self, model: Any) -> None:
        """Callback: the WebUI has another model, or other weights in the same. It may not be on the
        device yet: what that means is seen to by the next hook or step.
        """
        self._other_weights = True

    def end(self) -> None:
        """Leave the UNet as it is without us."""
        self.timed.rest()
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
                self.controlnets = tuple(map(self._in_truth, self._controlnets.report()))
            except Exception as error:
                self.rows, self.controlnets, self.trouble = (), (), trouble.once(error)
            return self.rows

    def news(self) -> list[str]:
        """What comparisons of this generation found, for the note under the picture."""
        with self._lock:
            if self._taken is None:
                return []
            self._taken.spot.look(wait=True)
            found = dict.fromkeys((*self._taken.spot.left.values(), *self._controlnets.news()))
        return [f"{why}. Steps before this was noticed may differ by as much" for why in found]

    def unrecorded(self) -> str:
        """Why blocks that are ours are launched one by one; empty where they are recorded."""
        why = "" if self._taken is None else self._taken.graphs.why_not(host.device())
        asked_for = settings.GRAPHS[settings.current().graphs] is not None
        return why if why != OFF or asked_for else f"{why}: {MOVED}"

    def _hold(self, model: Any) -> None:
        """Let the blocks be whose they are to be. Whatever goes wrong leaves them to the WebUI."""
        begins, self._begins = self._begins, None
        self._moment = begins or self._moment
        unet = host.unet_of(model)
        if begins is not None or self._wish is None or unet is not self._hopeless:
            self.trouble, self._hopeless = "", None
        try:
            self._held(model, unet, begins)
            self.look()
        except Exception as error:
            self.trouble, self._hopeless = f"ours failed: {trouble.once(error)}", unet
            try:
                self._give_back()
            except Exception as again:
                trouble.once(again)

    def _held(self, model: Any, unet: nn.Module | None, begins: tuple[int, int] | None) -> None:
        if self._unet is not None and not self._fits(unet):
            self._give_back()
        if self._wish is None or (unet is not None and unet is self._hopeless):
            return
        self.trouble = obstacle(unet) or self.timed.why_theirs(unet)
        if unet is None or self.trouble:
            self._give_back()
        elif self._taken is None:
            self._take(model, unet, self._wish)
            begins = self._moment
        elif begins is not None:
            self._taken.take_over(anew=False)
        if self._taken is not None and begins is not None:
            self._taken.generation_begins(*begins)
            self._with_controlnets(partial(self._controlnets.begin, *begins))
        for taken in (self._taken, *self._controlnets.taken):
            if isinstance(taken, ForgeTakeover):
                taken.renewed()
        if self._taken is not None and not self._taken.stand_ins:
            self.trouble = UNKNOWN

    def _switch(self, ours: bool) -> None:
        """A sampler makes its first step: the blocks are to be ours, or the WebUI's, to be timed or
        since these are faster.
        """
        with self._lock:
            self._hold(host.loaded_model())
            if ours and isinstance(self._taken, ForgeTakeover):
                self._taken.call_begins()

    def _setting(self) -> str | None:
        """What beside the model decides how fast a step is; None where no block can be ours."""
        unet, aside = host.unet_of(host.loaded_model()), _stands_aside(optimizer())
        if obstacle(unet) or unet is self._hopeless:
            return None
        if self._taken is not None and not counted(self.look())[0]:
            return None
        hook = WebUIHook(aside) if host.forge() is None else ForgeHook(aside)
        assert unet is not None
        why = hook.ready(()) or hook.attention(unet)
        method = getattr(host.attribute("modules.sd_hijack", "current_optimizer"), "name", "")
        level = a1111_session.current().level
        return f"{level}, graphs wanted: {hook.graphs}, attention: {method} {why}"

    def _take(self, model: Any, unet: nn.Module, wish: Session) -> None:
        aside = _stands_aside(optimizer())
        self._unet, self._by, self._other_weights = unet, wish, False
        if host.forge() is not None:
            patched = getattr(host.patcher_of(model, "unet"), "model", None)
            if not isinstance(patched, nn.Module):
                raise TypeError("this Forge's model has no patcher of its UNet")
            taken = ForgeTakeover(unet, patched, wish, aside)
            self._hook, self._taken = taken.hook, taken
        else:
            self._hook = WebUIHook(aside)
            self._taken = UnetTakeover([unet], wish, self._hook)
        self._taken.take_over()

    def _hold_controlnets(self, models: list[nn.Module]) -> None:
        if self._by is not None and self._hook is not None:
            session = self._by.of_part(CONTROLNET)
            make = partial(_controlnets_takeover, session=session, hook=self._hook)
            hold = partial(self._controlnets.hold, models, make, self._moment)
            self._with_controlnets(hold)

    def _with_controlnets(self, do: Callable[[], None]) -> None:
        """Whatever goes wrong leaves them to the WebUI."""
        try:
            do()
        except Exception as error:
            host.say_once(f"ControlNet's blocks are the WebUI's: {trouble.once(error)}")
            self._controlnets.give_back()

    def _fits(self, unet: nn.Module | None) -> bool:
        """Whether what is taken over may stay so. Other weights may have another dtype."""
        same = unet is self._unet and self._wish is self._by
        if self._taken is not None and self._hook is not None:
            same = same and self._taken.graphs.wish == self._hook.graphs
        return same and self._taken is not None and self._taken.is_on and not self._other_weights

    def _give_back(self) -> None:
        """Forgotten only when all of it is back: short of memory, the rest is given back later."""
        self._controlnets.give_back()
        if self._taken is not None:
            self._taken.give_back()
        self._taken = self._unet = self._by = self._hook = None
        self.rows = self.controlnets = ()

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


def _stands_aside(ours: Any) -> Callable[[], bool]:
    """Asks whether attention is the WebUI's own, by our optimizer or a Forge's seam."""
    return lambda: ours is None or ours.stands_aside


def _controlnets_takeover(model: nn.Module, session: Session, hook: Hook) -> UnetTakeover:
    if isinstance(hook, ForgeHook):
        return ForgeTakeover(model, model, session, hook.stands_aside)
    return UnetTakeover([model], session, hook)


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
    return a1111_session.refusals(
        LAYER_NORM, "the UNet's kernels; the first use of each compiles it"
    )


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
