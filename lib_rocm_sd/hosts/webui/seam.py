"""Where attention becomes ours: what A1111's optimizer and a Forge's functions have in common."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.webui import background, host
from lib_rocm_sd.hosts.webui.background import ATTENTION
from lib_rocm_sd.lab.speed_job import Attention


class Seam(ABC):
    """Attention of this WebUI. While `aside` or `waits` is set, the WebUI's own is what computes.

    `waits`: the kernels are being compiled or tried, or proved useless.
    """

    def __init__(self) -> None:
        self.aside = False
        self.waits = False
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
                self._wait()
        if reasons:
            host.say_once(f"not used on this machine: {'; '.join(reasons)}")
        return reasons

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
