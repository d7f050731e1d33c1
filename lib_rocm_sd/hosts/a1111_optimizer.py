"""Our entry in the WebUI's list of attention optimizers: applies, undoes, steps aside."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

from lib_rocm_sd.device import identify
from lib_rocm_sd.engine import engine
from lib_rocm_sd.hosts import a1111_attention as attention
from lib_rocm_sd.hosts import a1111_host as host

PRIORITY = 110
"""Above all of the WebUI's own that a GPU can have, so that "Automatic" picks ours wherever it is
listed, which is on supported devices only."""


class RocmSdOptimization:
    """Mixed with the WebUI's SdOptimization by `make`.

    While `aside` is set, `apply` applies what the WebUI would have picked without us, so a model
    loaded in the middle of a generation for which we are switched off gets that, too.
    """

    name = host.NAME
    label = "fused attention for AMD GPUs"
    cmd_opt = "opt_rocm_sd"
    priority = PRIORITY

    def __init__(self) -> None:
        self.aside = False
        self._stand_in: Any = None
        self._replaced: dict[type, host.Forward] = {}
        self._hosts_own: dict[type, host.Forward] = {}
        self._lock = threading.RLock()  # the WebUI applies in the thread that loads the model, too
        self._cross = attention.cross_attention(self.hosts_own)
        self._block = attention.attn_block(self.hosts_own)

    def is_available(self) -> bool:
        """Device supported, kernels compiled, self-test passed. Never raises."""
        try:
            device = host.device()
            info = identify(device)
            if not info.reasons:
                host.say_once(
                    f"checking the attention kernel for {info.gfx}; the first start compiles it"
                )
            reasons = engine.usable(device)
        except Exception as error:
            reasons = [f"{type(error).__name__}: {error}"]
        if reasons:
            host.say_once(f"not used on this machine: {'; '.join(reasons)}")
        return not reasons

    def apply(self) -> None:
        """Replace the forwards of ldm's and sgm's CrossAttention and AttnBlock."""
        with self._lock:
            if self._replaced:
                self.undo()
            ours = self._forwards()
            self._replaced = _get(ours)
            self._hosts_own = {}
            if not self.aside:
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
            if aside == self.aside:
                return
            applied = host.current_optimizer() is self
            if applied:
                self.undo()
            self.aside = aside
            if applied:
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
        if self.aside or not self._replaced:
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
