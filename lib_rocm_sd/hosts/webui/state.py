"""Attention of this WebUI, and its status line: what will run, or why nothing will."""

from __future__ import annotations

from typing import Any

from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.webui import (
    forge_seam,
    host,
)
from lib_rocm_sd.hosts.webui import (
    optimizer as a1111_optimizer,
)
from lib_rocm_sd.hosts.webui import (
    settings as a1111_settings,
)
from lib_rocm_sd.hosts.webui import (
    vae as a1111_vae,
)

OTHERWISE = "the WebUI's own attention is used"


def optimizer() -> Any:
    """Where attention becomes ours, a Seam; None in a WebUI that has no place for it."""
    if host.shortcomings():
        return None
    forge = host.forge()
    if forge is not None:
        return forge_seam.make(forge)
    return a1111_optimizer.make(host.attribute("modules.sd_hijack_optimizations", "SdOptimization"))


def status() -> str:
    """A line about attention and mostly one about the VAE, for people; never raises."""
    try:
        lines = [_status(), "" if host.shortcomings() else a1111_vae.status()]
    except Exception as error:
        return f"Not active: {trouble.once(error)}"
    return "\n".join(line for line in lines if line)


def _status() -> str:
    lacking = host.shortcomings()
    if lacking:
        return (
            "Not active: this WebUI has no place for an attention optimizer "
            f"({'; '.join(lacking)}). It runs as if this extension were not installed."
        )
    ours = optimizer()
    device = host.device()
    line = engine.status_line(device, OTHERWISE)
    text = line[:1].upper() + line[1:] + "."
    if engine.usable(device):
        return text
    if not a1111_settings.current().attention:
        return (
            f"Ready, but not in use: '{a1111_settings.ATTENTION}' is not selected in Settings > "
            "ROCm SD > Operations that may be replaced."
        )
    if ours.is_chosen:
        taken = displaced()
        return f"{text} But {taken}, so ours gets only the calls it passes on." if taken else text
    return f"Ready, but not in use: {ours.why_another()}"


def displaced() -> str:
    """Who has taken the place of our attention, and where; empty where nobody has."""
    ours = optimizer()
    found = ours.displaced_by() if ours.is_applied else {}
    return ", ".join(f"{name} has replaced {' and '.join(where)}" for name, where in found.items())
