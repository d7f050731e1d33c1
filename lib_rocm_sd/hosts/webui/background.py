"""What the WebUI's card needs is compiled, and then tried, while the WebUI is open."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.hosts.webui import host, trials
from lib_rocm_sd.runtime import background
from lib_rocm_sd.shipped import AT_START, shipped
from lib_rocm_sd.trials import stamp, zluda

ATTENTION, VAE, UNET = AT_START
_UNET_OPS = ("linear", "layer norm")
BEING_TESTED = "being tested"


def begin(settle: Callable[[], None]) -> None:
    """Start compiling what is missing, and trying what was not tried; returns at once, and does
    nothing where that runs already.

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

    def compiled(part: str) -> None:
        if not background.refusal(part):
            trials.expect(part, settle)
        if part == ATTENTION:
            settle()

    before = background.state().running
    if info.arch.is_amd:
        background.start(info.arch, shipped(info.arch, AT_START), host.say, compiled)
    if background.state().running and not before:
        stamp.drop(info.arch.gfx)
        host.say("until they are ready the WebUI's own code makes the pictures")
    for part in AT_START:
        if not background.refusal(part):
            trials.expect(part, settle)
    trials.expect_training()


def _beside_zluda(settle: Callable[[], None]) -> None:
    """It was tested: go on as at the start, or leave."""
    begin(settle)
    settle()


def waits(part: str) -> bool:
    """Whether a part will be ready, or given up, later. Takes no lock."""
    return zluda.is_running() or background.waits(part) or trials.waits(part)


def at_work(part: str) -> str:
    """What is done with the kernels of a part, for an infotext; empty where nothing is."""
    if background.waits(part):
        return "being compiled"
    return BEING_TESTED if trials.waits(part) else ""


def pending(op_name: str) -> str:
    """Why the kernels of an op have to be waited for; empty if not. Takes no lock."""
    if zluda.is_running():
        return zluda.WAITS
    part = ATTENTION if op_name == "attention" else UNET if op_name in _UNET_OPS else VAE
    return background.refusal(part) or trials.pending(part)
