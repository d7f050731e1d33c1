"""Upscaling networks in the WebUI: in hires fix, Extras, img2img and scripts.

The seam is the function that walks a picture in tiles, `upscale_with_model`, and SwinIR's,
`upscale_2`, in each Python module that has it. Where the network is ours it is called for the whole
picture, as by a tile size of 0 in the WebUI's settings; else as it was called.

Read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd, lllyasviel/stable-diffusion-webui-forge
dfdcbab6 and Panchovix/stable-diffusion-webui-reForge a697b2d3, modules/upscaler_utils.py: the same
in all. In Haoming02/sd-webui-forge-classic 17d104b6 it may compose tiles on the GPU.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from lib_rocm_sd import report
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.ui.options import DEFAULTS, UPSCALER_MODES, Options
from lib_rocm_sd.hosts.upscaler import LeftError, whole
from lib_rocm_sd.hosts.webui import background, host, settings, vae
from lib_rocm_sd.hosts.webui import session as a1111_session
from lib_rocm_sd.hosts.webui.progress import Watch
from lib_rocm_sd.hosts.webui.seams import optimizer
from lib_rocm_sd.modules.patches import Patch, put, take
from lib_rocm_sd.shipped import SWINIR_PART, UPSCALER_PART
from lib_rocm_sd.upscaler.program import PART
from lib_rocm_sd.vae.bands import Interrupted

WALK, OTHER_WALK = "upscale_with_model", "upscale_2"
SWINIR = "SwinIR"
"""What the WebUI calls the upscaler whose script, which is no module, takes OTHER_WALK."""


@dataclass
class Turn:
    """One generation, or one picture of Extras. `is_begun`: pictures are made; a script may upscale
    before. `asked`: something was upscaled, ours or not.
    """

    is_begun: bool = False
    asked: bool = False
    ran: dict[str, None] = field(default_factory=dict)
    left: dict[str, None] = field(default_factory=dict)


class Walk:
    """Stands in for `theirs`, the WebUI's function."""

    def __init__(self, theirs: Callable[..., Any], upscale: Callable[..., Any]) -> None:
        functools.update_wrapper(self, theirs)
        self.theirs, self._upscale = theirs, upscale

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._upscale(self.theirs, *args, **kwargs)


def _at_once(theirs: Callable[..., Any], call: inspect.BoundArguments) -> Any:
    """The picture that `theirs`, a WALK, makes without tiles."""
    return theirs(*call.args, **{**call.kwargs, "tile_size": 0})


def _at_once_by_walk(theirs: Any, call: inspect.BoundArguments) -> Any:
    """As `_at_once` for OTHER_WALK, which without tiles leaves the picture on the CPU. A wrapper of
    an extension, which would be passed by, has no WALK among its globals: the picture is its own.
    """
    walk = theirs.__globals__[WALK]
    walk = walk.theirs if isinstance(walk, Walk) else walk
    return walk(call.arguments["model"], call.arguments["img"], tile_size=0)


WALKS = {WALK: _at_once, OTHER_WALK: _at_once_by_walk}
"""By their names, how they are called for whole pictures."""


class UpscalerSession:
    """Who runs upscaling networks, for this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._patches: list[Patch] = []
        self._told: set[str] = set()
        self.turn = Turn()
        self._asked, self._job = DEFAULTS, host.job()

    @property
    def asked(self) -> Options:
        """What holds now: what was asked for until the WebUI's job has ended, since a script may
        upscale after its pictures. Between jobs networks are ours, as attention is.
        """
        return self._asked if host.job() == self._job else DEFAULTS

    @property
    def is_wanted(self) -> bool:
        """Whether networks are to be ours where they can."""
        asked = self.asked
        wanted = asked.enable and UPSCALER_MODES[asked.upscaler] and bool(self._patches)
        return wanted and settings.current().upscaler

    def take_over(self) -> None:
        """Callback, before the UI is created, when every script and extension is loaded."""
        for module, (name, at_once) in product(host.python_modules(), WALKS.items()):
            theirs = vars(module).get(name)
            if callable(theirs) and not isinstance(theirs, Walk):
                walk = Walk(theirs, partial(self._upscale, at_once))
                self._patches.append(put(module, name, walk))
        for data in host.attribute("modules.shared", "sd_upscalers") or ():
            if self.serves(data):
                optimizer().begin_upscaler(_part(data.scaler.name == SWINIR))

    def unload(self) -> None:
        """Leave each place as it is without us."""
        while self._patches:
            take(self._patches.pop())

    def set_up(self, options: Options) -> None:
        """A generation is asked for; a script may upscale before its first picture is begun."""
        self.turn = Turn()
        self.establish(options)

    def begin(self) -> None:
        """Its pictures are begun, or those of another that had no `set_up`."""
        if self.turn.is_begun:
            self.turn = Turn()
        self.turn.is_begun = True

    def establish(self, options: Options) -> None:
        """Make what `options` ask for hold from now on."""
        self._asked, self._job = options, host.job()

    def end(self) -> None:
        """The generation has ended, and what it asked for, unless it is part of a job."""
        if host.job() is None:
            self.establish(DEFAULTS)

    def serves(self, data: Any) -> bool:
        """Whether networks of an installed upscaler (the WebUI's UpscalerData) may be ours."""
        module = sys.modules.get(type(getattr(data, "scaler", None)).__module__)
        path = str(getattr(data, "local_data_path", "") or "")
        walk = getattr(module, WALK, None)
        if getattr(getattr(data, "scaler", None), "name", "") == SWINIR:
            walk = host.attribute("modules.upscaler_utils", OTHER_WALK)
        return isinstance(walk, Walk) and Path(path).is_file()

    def news(self) -> list[str]:
        """What went otherwise than asked in this generation, and has not been told before."""
        fresh = [message for message in self.turn.left if message not in self._told]
        self._told.update(fresh)
        return fresh

    def _upscale(
        self, at_once: Callable[..., Any], theirs: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The picture (PIL.Image.Image) that `theirs` makes of another by a network."""
        self.turn.asked = True
        watch = Watch(PART, may_stop=True, patience_s=0.0)
        if not self.is_wanted or watch.interrupted:
            return theirs(*args, **kwargs)
        call = inspect.signature(theirs).bind(*args, **kwargs)
        try:
            with self._lock, watch:
                return self._whole(partial(at_once, theirs), call, watch)
        except Interrupted:
            return call.arguments["img"]  # what the WebUI gives where its tiles are interrupted
        except LeftError as left:
            self._leave(str(left))
        except Exception as error:  # of the WebUI's own, which a tile size of 0 may be new to
            self._leave(f"it does not take a whole picture: {trouble.once(error)}")
        return theirs(*args, **kwargs)

    def _whole(
        self, at_once: Callable[..., Any], call: inspect.BoundArguments, watch: Watch
    ) -> Any:
        with whole(
            call.arguments["model"],
            a1111_session.current(),
            progress=watch.progress,
            interrupt=watch.interrupt,
        ) as ours:
            part = _part(ours.program.network.has_windows)
            optimizer().begin_upscaler(part)
            waits = background.refusal(part)
            if waits:
                raise LeftError(waits)
            picture = at_once(call)
        self.turn.ran[ours.manner] = None
        return picture

    def _leave(self, why: str) -> None:
        message = f"an upscaler was left to the WebUI: {why}"
        self.turn.left[message] = None
        report.event(message)
        host.say_once(message)


def _part(has_windows: bool) -> str:
    """What is compiled and tried for such a network."""
    return SWINIR_PART if has_windows else UPSCALER_PART


def why_not(options: Options) -> list[str]:
    """Why no network will be ours in a picture that is made with `options`; empty if one may be."""
    if not options.enable:
        return ["Enable is off"]
    if not UPSCALER_MODES[options.upscaler]:
        return ["Upscaler is Off"]
    if not settings.current().upscaler:
        return ["Settings > ROCm SD excludes the upscaler"]
    waits = background.refusal(UPSCALER_PART)
    return vae.refusals() or ([waits] if waits else list(session.turn.left))


session = UpscalerSession()
"""The session of the process; survives "Reload UI"."""
