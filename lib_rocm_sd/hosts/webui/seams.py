"""Where attention becomes ours: in A1111's list of optimizers, or in a Forge's functions."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.webui import attention, background, host, session
from lib_rocm_sd.hosts.webui.attention import Bindings, Function, Method, given, of_functions
from lib_rocm_sd.hosts.webui.trials import trials
from lib_rocm_sd.lab.speed_job import Attention
from lib_rocm_sd.modules import patches
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.shipped import AT_START, ATTENTION_PART, in_order

PRIORITY = 110
"""Above all of the WebUI's own that a GPU can have, so that "Automatic" picks ours wherever it is
listed, which is on supported devices only."""
MMDIT = "modules.models.sd3.mmdit"
"""A1111's SD 3 (dev branch and 1.10): its `attention`, from other_impls.py, is (q, k, v, heads,
mask), with q and k (B, L, C) and v (B, L, H, D). Its text encoders call the one in other_impls.py,
which stays the WebUI's.
"""


class Seam(ABC):
    """Attention of this WebUI. While `aside` or `waits` is set, the WebUI's own is what computes.

    `waits`: the kernels are being compiled or tried, or proved useless.
    """

    def __init__(self) -> None:
        self.aside = False
        self.waits = False
        self._order_for = ""
        """The UNet of the checkpoint for which the kernels are in order."""
        self.stands_aside = True
        """Read by what we put in the WebUI's place, at each call."""
        self._lock = threading.RLock()  # the WebUI applies in the thread that loads the model, too

    # --- whether ours can be used

    def check(self) -> list[str]:
        """Why ours cannot be used; empty where kernels are compiled and tested, or just on the way.

        Never raises. What has to be compiled and tried is, in the background; `settle` is called
        when it is.
        """
        reasons = self._compile()
        if not reasons and not self.waits:
            reasons = self._unusable()
            if reasons and engine.waits(host.device()):
                reasons = []
                with self._lock:
                    self.waits = True
                    self._refresh()
        if reasons:
            host.say_once(f"not used on this machine: {'; '.join(reasons)}")
        return reasons

    def compile_again(self) -> None:
        """Begin as at the WebUI's start, after caches and failures were forgotten."""
        if not self._compile() and not self.waits:
            self._when_ready()

    def order(self) -> None:
        """Have compiled and tried first what the checkpoint needs that is loaded now, and what no
        other needs, which a start leaves out.
        """
        kind, before = host.checkpoint_kind(), self._order_for
        self._order_for = kind
        more = {*in_order(kind)} - {*AT_START}
        if kind != before and (more or background.at_work(*AT_START)):
            try:
                background.begin(self._when_ready)
                trials.order()
            except Exception as error:
                host.say_once(f"kernels are not put in another order: {trouble.once(error)}")

    def begin_upscaler(self, part: str) -> None:
        """Have compiled and tried what an upscaler's part needs, too, once. Never raises."""
        try:
            background.begin_upscaler(self._when_ready, part)
        except Exception as error:
            host.say_once(f"an upscaler's kernels are not compiled ahead: {trouble.once(error)}")

    def settle(self) -> None:
        """The kernels are compiled and tried, or will never be: take over, or leave. Waits for its
        turn; nothing where more is to be waited for.
        """
        try:
            with host.between_generations():
                reasons = self._unusable()
                if not reasons:
                    self._take_over()
                elif not (background.waits(ATTENTION_PART) or engine.waits(host.device())):
                    host.say_once(f"not used on this machine: {'; '.join(reasons)}")
                    self._withdraw()
        except Exception as error:
            host.say_once(f"not used: {trouble.once(error)}")

    def step_aside(self, aside: bool) -> None:
        """Let what the WebUI would have without us work, until called with False."""
        with self._lock:
            self.aside = aside
            self._refresh()

    def _compile(self) -> list[str]:
        """Start what is missing and note whether there is anything to wait for."""
        self._order_for = host.checkpoint_kind()
        try:
            background.begin(self._when_ready)
        except Exception as error:
            return [trouble.once(error)]
        with self._lock:
            self.waits = background.waits(ATTENTION_PART)
            self._refresh()
        return []

    def _when_ready(self) -> None:
        threading.Thread(target=self.settle, name="rocm_sd settling", daemon=True).start()

    def _unusable(self) -> list[str]:
        """Why our kernels cannot be used, after compiling and testing what was not yet."""
        return session.refusals(ATTENTION, "the attention kernel for {gfx}")

    # --- whose attention is

    @property
    def works(self) -> bool:
        """Whether attention is ours at the moment, were it not for other extensions."""
        return self.is_applied and not self.stands_aside

    @property
    @abstractmethod
    def is_applied(self) -> bool:
        """Whether attention is ours, were it not for Enable, settings and what is waited for."""

    @property
    @abstractmethod
    def is_chosen(self) -> bool:
        """Whether it is, or will be once a model is loaded."""

    @property
    @abstractmethod
    def in_use(self) -> str | None:
        """The name of the attention that the WebUI has now; None where it has not said yet."""

    @abstractmethod
    def why_another(self) -> str:
        """Why the WebUI uses another attention than ours, and what to do about it."""

    @abstractmethod
    def displaced_by(self) -> dict[str, list[str]]:
        """Who sits where ours were put, by name, and in which places."""

    @abstractmethod
    def hosts_attention(self) -> str:
        """The attention that the WebUI has where it is not ours, for people; empty: not known."""

    @abstractmethod
    def methods(self) -> dict[str, Attention]:
        """What the WebUI computes attention by without us, called as a layer of the UNet does."""

    # --- from start to end

    @abstractmethod
    def begin(self) -> None:
        """Before the UI is created, also after "Reload UI"."""

    @abstractmethod
    def leave(self) -> None:
        """Before scripts are loaded anew: leave what would be there without us."""

    @abstractmethod
    def _take_over(self) -> None:
        """The kernels may be used from now on; no picture is being made."""

    @abstractmethod
    def _withdraw(self) -> None:
        """The kernels are of no use; no picture is being made."""

    @abstractmethod
    def _refresh(self) -> None:
        """Make `stands_aside`, and what goes with it, hold."""


class RocmSdOptimization(Seam):
    """Mixed with the WebUI's SdOptimization by `make_optimization`.

    While it stands aside, our forwards call those of the optimizer that the WebUI would have picked
    without us; whoever has wrapped ours stays where it is. It is in the WebUI's list while it
    waits, so that "Automatic" and the setting stay as they will be.
    """

    name = host.NAME
    label = "fused attention for AMD GPUs"
    cmd_opt = "opt_rocm_sd"
    priority = PRIORITY

    def __init__(self) -> None:
        super().__init__()
        self._stand_in: Any = None
        self._patches: list[patches.Patch] = []
        self._functions: list[patches.Patch] = []
        self._hosts_own: dict[type, host.Forward] = {}
        self._cross = attention.cross_attention(self)
        self._block = attention.attn_block(self)

    def is_available(self) -> bool:
        """Asked by the WebUI, which keeps in its list who says yes."""
        return not self.check()

    def begin(self) -> None:
        """After "Reload UI", apply ours where it is chosen.

        Before a model was loaded there is nothing to do: loading one applies the WebUI's choice.
        """
        current = host.current_optimizer()
        if current is not None and current is not self and host.choice() is self:
            host.apply_choice()

    def leave(self) -> None:
        listed = host.optimizers()
        listed[:] = [item for item in listed if item is not self]
        if host.current_optimizer() is self:
            host.apply_choice()
        self.aside = False

    @property
    def is_applied(self) -> bool:
        return host.current_optimizer() is self

    @property
    def is_chosen(self) -> bool:
        return (host.current_optimizer() or host.choice()) is self

    @property
    def in_use(self) -> str | None:
        return getattr(host.current_optimizer(), "name", None)

    def why_another(self) -> str:
        opts: Any = host.attribute("modules.shared", "opts")
        selection = getattr(opts, host.SETTING, "Automatic")
        chosen: Any = host.current_optimizer() or host.choice()
        name = "none" if chosen is None else f"'{chosen.title()}'"
        ours = f"'{self.title()}'"  # type: ignore[attr-defined]
        if self not in host.optimizers():
            return f"the WebUI has not listed {ours} yet; reload the UI."
        if selection == "Automatic":
            return (
                f"a command-line flag makes 'Automatic' pick {name}; choose {ours} in "
                "Settings > Optimizations > Cross attention optimization."
            )
        return (
            f"Settings > Optimizations > Cross attention optimization is '{selection}'; choose "
            f"'Automatic' or {ours} there."
        )

    def hosts_attention(self) -> str:
        chosen = self._other()
        return f"the WebUI's {chosen.title()}" if chosen is not None else ""

    def methods(self) -> dict[str, Attention]:
        cross, block = host.attention_classes()
        if not cross or not block:
            return {}
        other = self._other()
        name = "none" if other is None else str(other.name)
        return {name: Method(cross[0], block[0], self.hosts_own if self.is_applied else None)}

    def _other(self) -> Any:
        """The optimizer that the WebUI has, or would have without us; None for none."""
        current = host.current_optimizer()
        return host.choice(without=self) if current is None or current is self else current

    def _take_over(self) -> None:
        """What the WebUI would have done if we had been ready when it asked."""
        with self._lock:
            waited, self.waits = self.waits, False
            listed = host.optimizers()
            if self not in listed:
                listed.append(self)
                listed.sort(key=lambda item: item.priority, reverse=True)
            current = host.current_optimizer()
            if current is self:
                self._refresh()
            elif current is not None and host.choice() is self:
                host.apply_choice()
        if waited and host.current_optimizer() is self:
            host.say("attention runs on our kernel from now on")

    def _withdraw(self) -> None:
        """Leave the WebUI's list. Wherever we are applied all the same, we stand aside."""
        with self._lock:
            self.waits = True
            self._refresh()
            listed = host.optimizers()
            listed[:] = [item for item in listed if item is not self]
            if host.current_optimizer() is self:
                host.apply_choice()

    def apply(self) -> None:
        """Put our forwards into ldm's and sgm's CrossAttention and AttnBlock, and ours in the place
        of the function that SD 3's transformer calls. A model is loaded before its WebUI applies.
        """
        with self._lock:
            if self._patches:
                self.undo()
            mmdit = sys.modules.get(MMDIT)
            theirs = getattr(mmdit, "attention", None)
            if callable(theirs):
                function = Function(theirs, attention.packed, self)
                self._functions = [patches.put(mmdit, "attention", function)]
            self._patches = [
                patches.put(cls, "forward", forward) for cls, forward in self._forwards().items()
            ]
            self._refresh()

    def undo(self) -> None:
        """Put back what `apply` replaced, but where another has come after us.

        Such a one may call our forward all the same: it gives the WebUI's own from here on.
        """
        with self._lock:
            self._leave_stand_in()
            if not self._patches:
                super().undo()  # type: ignore[misc]
            for patch in [*self._patches, *self._functions]:
                patches.take(patch)
            self._patches, self._functions = [], []
            self._refresh()

    def displaced_by(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for patch in [*self._patches, *self._functions]:
            other = patches.displaced_by(patch)
            if other is not None:
                place = "SD 3's attention"
                if patch in self._patches:
                    family = patch.owner.__module__.split(".")[0]
                    place = f"{family}'s {patch.owner.__name__}"
                found.setdefault(patches.named(other), []).append(place)
        return found

    def _refresh(self) -> None:
        """The flag that our forwards read, and the stand-in's other traces."""
        if not self._patches:
            self.stands_aside, self._hosts_own = True, {}
        elif not (self.aside or self.waits):
            self._leave_stand_in()
            self.stands_aside = False
        elif not self.stands_aside or not self._hosts_own:
            self._hosts_own, self._stand_in = self._enter(host.choice(without=self))
            self.stands_aside = True

    def hosts_own(self, module: torch.nn.Module) -> host.Forward:
        """The forward that the WebUI would have used for `module` without us."""
        known = self._hosts_own.get(type(module))
        if known is not None:
            return known
        with self._lock:
            cross, block = host.attention_classes()
            known_ones = (each for each in type(module).__mro__ if each in cross or each in block)
            # the first of a kind for a class of an extension that borrowed our forward
            cls: Any = next(known_ones, (cross if hasattr(module, "to_q") else block)[0])
            if not self._patches:
                sits: host.Forward = cls.forward
                return sits if host.is_its_own(sits) else self._ask_host()[cls]
            if not self._hosts_own:
                self._hosts_own = self._ask_host()
            return self._hosts_own[cls]

    def _forwards(self) -> dict[type, host.Forward]:
        cross, block = host.attention_classes()
        return {**dict.fromkeys(cross, self._cross), **dict.fromkeys(block, self._block)}

    def _ask_host(self) -> dict[type, host.Forward]:
        """The WebUI's forwards without us, asked of its optimizer, which is not left applied."""
        if not self._patches:
            current = host.current_optimizer()
            return self._enter(None if current is self else current)[0]
        found, entered = self._enter(host.choice(without=self))
        self._leave(entered)
        return found

    def _enter(self, stand_in: Any) -> tuple[dict[type, host.Forward], Any]:
        """Apply an optimizer of the WebUI's, but leave the classes as they are.

        Gives its forwards and itself; the WebUI's default ones and None where it fails.
        """
        with self._classes_kept():
            super().undo()  # type: ignore[misc]
            for patch in self._patches:
                if host.is_its_own(patch.before):
                    patch.owner.forward = patch.before
            default = _get(self._forwards())
            try:
                if stand_in is not None:
                    stand_in.apply()
            except Exception as error:
                trouble.once(error)
                return default, None
            return _get(default), stand_in

    def _leave_stand_in(self) -> None:
        self._leave(self._stand_in)
        self._stand_in = None

    def _leave(self, stand_in: Any) -> None:
        """Undo what an optimizer did beside setting forwards."""
        if stand_in is None:
            return
        with self._classes_kept():
            try:
                stand_in.undo()
            except Exception as error:
                trouble.once(error)

    @contextmanager
    def _classes_kept(self) -> Iterator[None]:
        """Whoever sits in the WebUI's classes sits there again afterwards."""
        now = _get(self._forwards())
        try:
            yield
        finally:
            for cls, forward in now.items():
                cls.forward = forward  # type: ignore[attr-defined]


def _get(classes: Iterable[type]) -> dict[type, host.Forward]:
    return {cls: cls.forward for cls in classes}  # type: ignore[attr-defined]


class ForgeSeam(Seam):
    """Ours are in place unless it stands aside; then each place has what Forge put there."""

    def __init__(self, kind: host.Kind) -> None:
        super().__init__()
        self._kind = kind
        self._usable = False
        self._bindings = Bindings(self._function)

    def begin(self) -> None:
        self._usable = not self.check()
        self.step_aside(self.aside)

    def leave(self) -> None:
        self._usable = False
        self.step_aside(False)

    @property
    def is_applied(self) -> bool:
        return self._usable

    @property
    def is_chosen(self) -> bool:
        return self._usable

    @property
    def in_use(self) -> str | None:
        return host.NAME if self.works else self._name

    def why_another(self) -> str:
        return "it has not been looked at yet; reload the UI."

    def displaced_by(self) -> dict[str, list[str]]:
        return self._bindings.displaced_by()

    def hosts_attention(self) -> str:
        return f"the WebUI's {self._name}"

    def methods(self) -> dict[str, Attention]:
        theirs = self._theirs(self._kind.packed[0])
        of_vae = self._theirs(self._kind.spatial) if self._kind.spatial else None
        return {self._name.removeprefix("attention_"): of_functions(theirs, of_vae)}

    @property
    def _name(self) -> str:
        """Name of the function that the UNet would call without us."""
        return str(getattr(self._theirs(self._kind.packed[0]), "__name__", "attention"))

    def _theirs(self, name: str) -> Any:
        return given(host.attribute(self._kind.attention, name))

    def _function(self, theirs: Any, name: str) -> Function:
        ours = attention.spatial if name == self._kind.spatial else attention.packed
        return Function(theirs, ours, self)

    def _take_over(self) -> None:
        with self._lock:
            waited, self.waits = self.waits, False
            self._usable = True
            self._refresh()
        if waited and self.works:
            host.say("attention runs on our kernel from now on")

    def _withdraw(self) -> None:
        with self._lock:
            self.waits, self._usable = True, False
            self._refresh()

    def _refresh(self) -> None:
        """The functions in their places. Where ours cannot be put, all are the WebUI's."""
        wanted = self._usable and not (self.aside or self.waits)
        try:
            if wanted:
                self._bindings.put(self._kind)
            else:
                self._bindings.take()
        except Exception as error:
            wanted = False
            host.say_once(f"attention is the WebUI's own: {trouble.once(error)}")
            self._bindings.take()
        self.stands_aside = not wanted


_made: dict[Any, Any] = {}


def optimizer() -> Any:
    """Where attention becomes ours, a Seam; None in a WebUI that has no place for it. The same one
    for the whole process: it survives "Reload UI".
    """
    if host.shortcomings():
        return None
    forge = host.forge()
    if forge is None:
        return make_optimization(
            host.attribute("modules.sd_hijack_optimizations", "SdOptimization")
        )
    if ForgeSeam not in _made:
        _made[ForgeSeam] = ForgeSeam(forge)
    return _made[ForgeSeam]


def make_optimization(base: type) -> Any:
    """The one optimizer of this process, on top of the WebUI's `base`."""
    if base not in _made:
        _made[base] = type("SdOptimizationRocmSd", (RocmSdOptimization, base), {})()
    return _made[base]
