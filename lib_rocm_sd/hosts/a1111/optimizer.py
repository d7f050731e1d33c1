"""Our entry in the WebUI's list of attention optimizers: applies, undoes, steps aside."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.a1111 import attention, background, host
from lib_rocm_sd.hosts.a1111.background import ATTENTION
from lib_rocm_sd.modules import patches

PRIORITY = 110
"""Above all of the WebUI's own that a GPU can have, so that "Automatic" picks ours wherever it is
listed, which is on supported devices only."""


class RocmSdOptimization:
    """Mixed with the WebUI's SdOptimization by `make`.

    While `aside` or `waits` is set, our forwards call those of the optimizer that the WebUI would
    have picked without us; whoever has wrapped ours stays where it is. `waits`: the kernels are
    being compiled or tried, or proved useless. It is in the WebUI's list meanwhile, so that
    "Automatic" and the setting stay as they will be.
    """

    name = host.NAME
    label = "fused attention for AMD GPUs"
    cmd_opt = "opt_rocm_sd"
    priority = PRIORITY

    def __init__(self) -> None:
        self.aside = False
        self.waits = False
        self.stands_aside = True
        """Read by our forwards at each call."""
        self._stand_in: Any = None
        self._patches: list[patches.Patch] = []
        self._hosts_own: dict[type, host.Forward] = {}
        self._lock = threading.RLock()  # the WebUI applies in the thread that loads the model, too
        self._cross = attention.cross_attention(self)
        self._block = attention.attn_block(self)

    def is_available(self) -> bool:
        """Device supported, and kernels compiled and tested, or just on the way. Never raises.

        What has to be compiled and tried is, in the background; `settle` is called when it is.
        """
        reasons = self._compile()
        if not reasons and not self.waits:
            reasons = self._unusable()
            if reasons and engine.waits(host.device()):
                reasons = []
                self._wait()
        if reasons:
            host.say_once(f"not used on this machine: {'; '.join(reasons)}")
        return not reasons

    def compile_again(self) -> None:
        """Begin as at the WebUI's start, after caches and failures were forgotten."""
        if not self._compile() and not self.waits:
            self._when_ready()

    def settle(self) -> None:
        """The kernels are compiled and tried, or will never be: take over, or leave. Waits for its
        turn; nothing where more is to be waited for.
        """
        try:
            with host.between_generations():
                reasons = self._unusable()
                if not reasons:
                    self._take_over()
                elif not (background.waits(ATTENTION) or engine.waits(host.device())):
                    self._withdraw(reasons)
        except Exception as error:
            host.say_once(f"not used: {trouble.once(error)}")

    def _compile(self) -> list[str]:
        """Start what is missing and note whether there is anything to wait for."""
        try:
            background.begin(self._when_ready)
        except Exception as error:
            return [trouble.once(error)]
        with self._lock:
            self.waits = background.waits(ATTENTION)
            self._refresh()
        return []

    def _wait(self) -> None:
        with self._lock:
            self.waits = True
            self._refresh()

    def _when_ready(self) -> None:
        threading.Thread(target=self.settle, name="rocm_sd settling", daemon=True).start()

    def _unusable(self) -> list[str]:
        """Why our kernels cannot be used, after compiling and testing what was not yet."""
        try:
            device = host.device()
            info = identify(device)
            if not info.reasons:
                host.say_once(f"checking the attention kernel for {info.gfx}")
            return engine.usable(device)
        except Exception as error:
            return [trouble.once(error)]

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

    def _withdraw(self, reasons: list[str]) -> None:
        """Leave the WebUI's list. Wherever we are applied all the same, we stand aside."""
        host.say_once(f"not used on this machine: {'; '.join(reasons)}")
        with self._lock:
            self.waits = True
            self._refresh()
            listed = host.optimizers()
            listed[:] = [item for item in listed if item is not self]
            if host.current_optimizer() is self:
                host.apply_choice()

    def apply(self) -> None:
        """Put our forwards into ldm's and sgm's CrossAttention and AttnBlock."""
        with self._lock:
            if self._patches:
                self.undo()
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
            for patch in self._patches:
                patches.take(patch)
            self._patches = []
            self._refresh()

    def step_aside(self, aside: bool) -> None:
        """Let what the WebUI would have picked without us work, until called with False."""
        with self._lock:
            self.aside = aside
            self._refresh()

    @property
    def works(self) -> bool:
        """Whether attention is ours at the moment, were it not for other extensions."""
        return host.current_optimizer() is self and not self.stands_aside

    def displaced_by(self) -> dict[str, list[str]]:
        """Who sits where our forwards were put, by name, and in which classes."""
        found: dict[str, list[str]] = {}
        for patch in list(self._patches):
            other = patches.displaced_by(patch)
            if other is not None:
                family = patch.owner.__module__.split(".")[0]
                found.setdefault(patches.named(other), []).append(
                    f"{family}'s {patch.owner.__name__}"
                )
        return found

    def _refresh(self) -> None:
        """Make the flag that our forwards read, and the stand-in's other traces, hold."""
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
            cls = self._class_of(module)
            if not self._patches:
                sits: host.Forward = cls.forward
                return sits if host.is_its_own(sits) else self._ask_host()[cls]
            if not self._hosts_own:
                self._hosts_own = self._ask_host()
            return self._hosts_own[cls]

    def _class_of(self, module: torch.nn.Module) -> Any:
        cross, block = host.attention_classes()
        known = (cls for cls in type(module).__mro__ if cls in cross or cls in block)
        # the first of a kind for a class of an extension that borrowed our forward
        return next(known, (cross if hasattr(module, "to_q") else block)[0])

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


_made: dict[type, Any] = {}


def make(base: type) -> Any:
    """The one optimizer of this process, on top of the WebUI's `base`; survives "Reload UI"."""
    if base not in _made:
        _made[base] = type("SdOptimizationRocmSd", (RocmSdOptimization, base), {})()
    return _made[base]
