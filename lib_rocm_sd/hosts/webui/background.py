"""What the WebUI's card needs is compiled, and then tried, while the WebUI is open."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.webui import host
from lib_rocm_sd.hosts.webui.trials import trials
from lib_rocm_sd.runtime import background
from lib_rocm_sd.shipped import (
    ATTENTION_PART,
    SD3_PART,
    UNETS,
    VAE_PART,
    in_order,
    shipped,
    unet_ops,
)
from lib_rocm_sd.trials import stamp, zluda

BEING_TRIED = "being tried"

_later: list[str] = []
"""Parts that no start needs and that were asked for since."""


def begin(settle: Callable[[], None]) -> None:
    """Start compiling what is missing, and trying what was not tried; returns at once. Where that
    runs already, what the checkpoint that is loaded now needs is compiled first from now on.

    `settle` is called, in another thread, when attention's kernels were all compiled, and when
    trials have decided something. It must not raise. Cards that are there for development only
    compile when something is tried.
    """
    engine.pending = pending
    identify(host.device())
    if zluda.listen(partial(_beside_zluda, settle)):
        return
    info = identify(host.device())
    if info.reasons or info.arch is None:
        return

    before, parts = background.state().running, (*in_order(host.checkpoint_kind()), *_later)

    def expect() -> None:
        """Have tried what is compiled, in order. A part may have no kernel that none before has."""
        for part in parts:
            if background.waits(part):
                return
            if not background.refusal(part):
                trials.expect(part, settle)

    def compiled(part: str) -> None:
        expect()
        if part == ATTENTION_PART:
            settle()

    if info.arch.is_amd:
        background.start(info.arch, shipped(info.arch, parts), host.say, compiled)
    if background.state().running and not before:
        stamp.drop(info.arch.gfx)
        host.say("until they are ready the WebUI's own code makes the pictures")
    expect()
    trials.expect_training()


def begin_upscaler(settle: Callable[[], None], part: str) -> None:
    """Start compiling and trying an upscaler's part, too, once; `settle` as `begin` says."""
    if part not in _later:
        _later.append(part)
        begin(settle)


def refusal(part: str) -> str:
    """Why a part has to be waited for, or will never be ready; empty if neither. Takes no lock."""
    return background.refusal(part) or trials.pending(part)


def _beside_zluda(settle: Callable[[], None]) -> None:
    """It was tested: go on as at the start, or leave."""
    try:
        begin(settle)
    except Exception as error:
        host.say_once(f"not used: {trouble.once(error)}")
    settle()


def waits(part: str) -> bool:
    """Whether a part will be ready, or given up, later. Takes no lock."""
    return zluda.is_running() or background.waits(part) or trials.waits(part)


def unet_parts() -> tuple[str, ...]:
    """What the UNet of the checkpoint waits for; all of UNETS where it is none that is known."""
    own = f"unet {host.checkpoint_kind()}"
    return (own,) if own in (*UNETS, SD3_PART) else tuple(UNETS)


def at_work(*parts: str) -> str:
    """What is done with the kernels of parts, for an infotext; empty where nothing is."""
    if any(map(background.waits, parts)):
        return "being compiled"
    return BEING_TRIED if any(map(trials.waits, parts)) else ""


def pending(op_name: str) -> str:
    """Why the kernels of an op have to be waited for; empty if not. Takes no lock."""
    if zluda.is_running():
        return zluda.WAITS
    parts: tuple[str, ...] = (VAE_PART,)
    if op_name == "attention":
        parts = (ATTENTION_PART,)
    elif op_name in unet_ops():
        parts = unet_parts()
    return next(filter(None, map(refusal, parts)), "")
