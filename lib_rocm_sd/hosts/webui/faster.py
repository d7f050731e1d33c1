"""The UNet of the WebUI where it is faster than with blocks of ours: its calls are timed while a
sampler makes steps (modules/faster.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.webui import host
from lib_rocm_sd.modules.faster import Contest, is_wanted

MIXED = "the WebUI's own UNet made some steps: it is timed once, to find out which is faster"


class TimedCalls:
    """Times one UNet at a time, which is not held. `switch(ours)`: its blocks are to be ours, or
    the WebUI's. `content()`: what of it is ours.
    """

    def __init__(self, switch: Callable[[bool], None], content: Callable[[], str]) -> None:
        self._switch, self._content = switch, content
        self._contest: Contest | None = None
        self._handles: list[Any] = []
        self._threads = threading.local()
        self._told: list[str] = []

    def listen(self, unet: nn.Module | None) -> None:
        """A sampler calls this UNet from now on."""
        if unet is None or not is_wanted():
            self.rest()
            return
        contest = self._contest
        if contest is None or contest.model() is not unet:
            self.rest()
            self._contest = Contest(unet, self._switched, self._content, self._told.append)
        if not self._handles:
            self._handles = [
                unet.register_forward_pre_hook(self._begins, with_kwargs=True),
                unet.register_forward_hook(self._ends, with_kwargs=True, always_call=True),
            ]

    def rest(self) -> None:
        """Calls of it are nobody's business until a sampler makes steps again."""
        while self._handles:
            self._handles.pop().remove()

    def why_theirs(self, unet: nn.Module | None) -> str:
        """Why the blocks of a UNet are the WebUI's; empty where they may be ours."""
        contest = self._contest
        if contest is None or unet is None or contest.model() is not unet or not is_wanted():
            return ""
        return contest.why_theirs

    def news(self) -> list[str]:
        """What was found out since it was asked last, for the note under the picture."""
        told, self._told[:] = list(dict.fromkeys(self._told)), []
        return told

    def _switched(self, ours: bool) -> None:
        contest = self._contest
        if not ours and contest is not None and contest.is_measuring:
            self._told.append(MIXED)
        self._switch(ours)

    def _begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before each call of the UNet. Another's forward may do more than the UNet's."""
        contest, after = self._contest, None
        try:
            if contest is not None and "forward" not in vars(module):
                after = contest.before(args, kwargs)
        except Exception as error:
            host.say_once(f"the UNet is not timed: {trouble.once(error)}")
        self._calls.append(after)

    def _ends(self, module: nn.Module, args: Any, kwargs: Any, made: Any) -> None:
        after = self._calls.pop() if self._calls else None
        try:
            if after is not None:
                after(made is not None)
        except Exception as error:
            host.say_once(f"the UNet is not timed: {trouble.once(error)}")

    @property
    def _calls(self) -> list[Callable[[bool], None] | None]:
        if not hasattr(self._threads, "calls"):
            self._threads.calls = []
        found: list[Callable[[bool], None] | None] = self._threads.calls
        return found
