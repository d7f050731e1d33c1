"""The UNet of the WebUI where it is faster than with blocks of ours: its calls are timed while a
sampler makes steps (modules/faster.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lib_rocm_sd.hosts.timed import TimedCalls
from lib_rocm_sd.hosts.webui import host, settings
from lib_rocm_sd.modules.faster import Contest, is_wanted

THEIRS = "the WebUI's own code"


class TimedUnet:
    """Times one UNet at a time, which is not held. `switch(ours)`: its blocks are to be ours, or
    the WebUI's. `setting()`: as a Contest asks for it.
    """

    def __init__(self, switch: Callable[[bool], None], setting: Callable[[], str | None]) -> None:
        self._switch, self._setting = switch, setting
        self._contest: Contest | None = None
        self._calls: TimedCalls | None = None
        self._picture: object = None
        self._is_alone = False
        self._told: list[str] = []

    def step_begins(self, unet: nn.Module | None, params: Any, alone: bool) -> None:
        """A sampler is about to call this UNet: `params` are those of its callback. Not `alone`:
        ControlNets have a part in it. Pictures with these are ours, and so are those in which the
        UNet's forward is another's, which may do more.
        """
        if getattr(getattr(params, "denoiser", None), "step", None) == 0:
            self._picture = object()
            self._is_alone = alone and unet is not None and "forward" not in vars(unet)
        if not self._is_alone:
            self._contest = None
        contest = self._contest_of(unet)
        if contest is None:
            self.rest()
        if contest is None and unet is not None and self._is_alone and is_compared():
            contest = Contest(unet, self._switch, self._setting, THEIRS, self._told.append)
        self._contest = contest
        if unet is not None and contest is not None and self._calls is None:
            self._calls = TimedCalls(unet, contest, lambda: self._picture, host.say_once)

    def rest(self) -> None:
        """Calls of it are nobody's business until a sampler makes steps again."""
        if self._calls is not None:
            self._calls.end()
        self._calls = None

    def why_theirs(self, unet: nn.Module | None) -> str:
        """Why the blocks of a UNet are the WebUI's; empty where they may be ours."""
        contest = self._contest_of(unet)
        return "" if contest is None else contest.why_theirs

    def news(self) -> list[str]:
        """What was found out since it was asked last, for the note under the picture."""
        told, self._told[:] = list(dict.fromkeys(self._told)), []
        if self._calls is not None and self._contest is not None and self._contest.is_timing_theirs:
            told.append(self._contest.why_theirs)
        return told

    def _contest_of(self, unet: nn.Module | None) -> Contest | None:
        """The UNet's own, as long as anything is compared."""
        contest = self._contest
        is_its = contest is not None and unet is not None and contest.model() is unet
        return contest if is_its and is_compared() else None


def is_compared() -> bool:
    """Whether the settings and the environment ask for it."""
    return settings.current().compare_speed and is_wanted()
