"""Compiling what the WebUI's card needs while the WebUI is open."""

from __future__ import annotations

from collections.abc import Callable

from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.hosts.a1111 import host
from lib_rocm_sd.runtime import background
from lib_rocm_sd.shipped import AT_START, shipped

ATTENTION, VAE = AT_START
waits = background.waits


def begin(attention_ready: Callable[[], None]) -> None:
    """Start compiling what is missing; returns at once, and does nothing where that runs already.

    `attention_ready` is called, in another thread, when attention's kernels were all tried. It must
    not raise. Cards that are there for development only compile at the first use.
    """
    engine.pending = pending
    info = identify(host.device())
    if info.reasons or info.arch is None or not info.arch.is_amd:
        return

    def told(part: str) -> None:
        if part == ATTENTION:
            attention_ready()

    before = background.state().running
    background.start(info.arch, shipped(info.arch, AT_START), host.say, told)
    if background.state().running and not before:
        host.say("until they are ready the WebUI's own code makes the pictures")


def pending(op_name: str) -> str:
    """Why the kernels of an op have to be waited for; empty if not. Takes no lock."""
    return background.refusal(ATTENTION if op_name == "attention" else VAE)
