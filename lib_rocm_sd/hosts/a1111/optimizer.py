"""Our entry in the WebUI's list of attention optimizers: applies, undoes, steps aside."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.hosts.a1111 import attention, background, host
from lib_rocm_sd.hosts.a1111.background import ATTENTION

PRIORITY = 110
"""Above all of the WebUI's own that a GPU can have, so that "Automatic" picks ours wherever it is
listed, which is on supported devices only."""


class RocmSdOptimization:
    """Mixed with the WebUI's SdOptimization by `make`.

    While `aside` or `waits` is set, `apply` applies what the WebUI would have picked without us, so
    a model loaded in the middle of a generation for which we are switched off gets that, too.
    `waits`: the kernels are being compiled, or proved useless. It is in the WebUI's list meanwhile,
    so that "Automatic" and the setting stay as they will be.
    """

    name = host.NAME
    label = "fused attention for AMD GPUs"
    cmd_opt = "opt_rocm_sd"
    priority = PRIORITY

    def __init__(self) -> None:
        self.aside = False
        self.waits = False
        self._stood_aside = False  # as of the last `apply`
        self._stand_in: Any = None
        self._replaced: dict[type, host.Forward] = {}
        self._hosts_own: dict[type, host.Forward] = {}
        self._lock = threading.RLock()  # the WebUI applies in the thread that loads the model, too
        self._cross = attention.cross_attention(self.hosts_own)
        self._block = attention.attn_block(self.hosts_own)

    def is_available(self) -> bool:
        """Device supported, and kernels compiled and tested, or just being compiled. Never raises.

        What has to be compiled is, in the background; `settle` is called when it is.
        """
        reasons = self._compile()
        if not reasons and not self.waits:
            reasons = self._unusable()
        if reasons:
            host.say_once(f"not used on this machine: {'; '.join(reasons)}")
        return not reasons

    def compile_again(self) -> None:
        """Begin as at the WebUI's start, after caches and failures were forgotten."""
        if not self._compile() and not self.waits:
            threading.Thread(target=self.settle, daemon=True).start()

    def settle(self) -> None:
        """The kernels are compiled, or will never be: take over, or leave. Waits for its turn."""
        try:
            with host.between_generations():
                reasons = self._unusable()
                self._withdraw(reasons) if reasons else self._take_over()
        except Exception as error:
            host.say_once(f"not used: {type(error).__name__}: {error}")

    def _compile(self) -> list[str]:
        """Start what is missing and note whether there is anything to wait for."""
        try:
            background.begin(self._when_compiled)
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
        with self._lock:
            self.waits = background.waits(ATTENTION)
            self._refresh()
        return []

    def _when_compiled(self) -> None:
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
            return [f"{type(error).__name__}: {error}"]

    def _take_over(self) -> None:
        """What the WebUI would have done if we had been ready when it asked."""
        with self._lock:
            self.waits = False
            listed = host.optimizers()
            if self not in listed:
                listed.append(self)
                listed.sort(key=lambda item: item.priority, reverse=True)
            current = host.current_optimizer()
            if current is self:
                self._refresh()
            elif current is not None and host.choice() is self:
                host.apply_choice()
        if host.current_optimizer() is self:
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
        """Replace the forwards of ldm's and sgm's CrossAttention and AttnBlock."""
        with self._lock:
            if self._replaced:
                self.undo()
            ours = self._forwards()
            self._replaced = _get(ours)
            self._hosts_own = {}
            self._stood_aside = self._stands_aside
            if not self._stands_aside:
                _set(ours)
                return
            self._stand_in = host.choice(without=self)
            if self._stand_in is not None:
                self._stand_in.apply()

    def undo(self) -> None:
        """Put back what `apply` replaced; where it replaced nothing, the WebUI's default."""
        with self._lock:
            if self._stand_in is not None:
                self._stand_in.undo()
                self._stand_in = None
            super().undo()  # type: ignore[misc]
            _set(self._replaced)
            self._replaced = {}

    def step_aside(self, aside: bool) -> None:
        """Let what the WebUI would have picked without us work, until called with False."""
        with self._lock:
            self.aside = aside
            self._refresh()

    @property
    def works(self) -> bool:
        """Whether attention is ours at the moment."""
        return host.current_optimizer() is self and not self._stood_aside

    @property
    def _stands_aside(self) -> bool:
        return self.aside or self.waits

    def _refresh(self) -> None:
        """Apply anew where that makes a difference."""
        if self._stood_aside != self._stands_aside and host.current_optimizer() is self:
            self.undo()
            self.apply()

    def hosts_own(self, module: torch.nn.Module) -> host.Forward:
        """The forward that the WebUI would have used for `module` without us."""
        with self._lock:
            if not self._hosts_own:
                self._hosts_own = self._ask_host()
            known = self._hosts_own
        mine = next((cls for cls in type(module).__mro__ if cls in known), None)
        if mine is None:  # a class of an extension that borrowed our forward
            cross, block = host.attention_classes()
            mine = (cross if hasattr(module, "to_q") else block)[0]
        return known[mine]

    def _forwards(self) -> dict[type, host.Forward]:
        cross, block = host.attention_classes()
        return {**dict.fromkeys(cross, self._cross), **dict.fromkeys(block, self._block)}

    def _ask_host(self) -> dict[type, host.Forward]:
        """Apply the WebUI's choice without us, note its forwards, and put ours back."""
        now = _get(self._forwards())
        if self._stands_aside or not self._replaced:
            return now
        stand_in = host.choice(without=self)
        _set(self._replaced)
        try:
            with suppress(Exception):  # the WebUI's default forwards, then
                if stand_in is not None:
                    stand_in.apply()
            found = _get(now)
            with suppress(Exception):
                if stand_in is not None:
                    stand_in.undo()
        finally:
            _set(now)
        return found


def _get(classes: Iterable[type]) -> dict[type, host.Forward]:
    return {cls: cls.forward for cls in classes}  # type: ignore[attr-defined]


def _set(forwards: dict[type, host.Forward]) -> None:
    for cls, forward in forwards.items():
        cls.forward = forward  # type: ignore[attr-defined]


_made: dict[type, Any] = {}


def make(base: type) -> Any:
    """The one optimizer of this process, on top of the WebUI's `base`; survives "Reload UI"."""
    if base not in _made:
        _made[base] = type("SdOptimizationRocmSd", (RocmSdOptimization, base), {})()
    return _made[base]
