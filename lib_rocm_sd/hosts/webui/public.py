"""What of this extension's state may leave the machine: no paths, so no names of users in them."""

from __future__ import annotations

import math
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd import __version__, cache, report
from lib_rocm_sd.device import DeviceInfo, identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.hosts.webui import host
from lib_rocm_sd.hosts.webui import session as a1111_session
from lib_rocm_sd.hosts.webui.seams import optimizer
from lib_rocm_sd.hosts.webui.several import session as a1111_several
from lib_rocm_sd.hosts.webui.trials import trials
from lib_rocm_sd.hosts.webui.unet import explained
from lib_rocm_sd.hosts.webui.unet import session as a1111_unet
from lib_rocm_sd.hosts.webui.vae import float32_reason
from lib_rocm_sd.lab.speed_session import Progress, session
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM
from lib_rocm_sd.runtime import background

NOT_YET = "it was not checked yet"
_WINDOWS = re.compile(
    r"(?:\b[A-Za-z]:[\\/]|\\\\[^\\/\s]+[\\/]|~\\)"
    r"(?:[^\\/:*?\"<>|\r\n;']+[\\/])*([^\\/:*?\"<>|\s;,')]*)"
)
_POSIX = re.compile(r"(?<![\w.\-/~])(?:~/(?:[\w.+@%-]+/)*|/(?:[\w.+@%-]+/)+)([\w.+@%-]*)")
_QUOTED = re.compile(r"""(['"])/[^'"\n]*/([^'"/\n]*)\1""")
_HOMES = re.compile(r"[\\/](?:home|users)[\\/][^\\/]*$", re.IGNORECASE)


def status() -> dict[str, Any]:
    """JSON-able: versions, device, what runs, what is compiled, what ran, the speed test.

    Waits for nothing, whatever a generation or a test does at the moment.
    """
    device = host.device()
    info = identify(device)
    ours = optimizer()
    found = {
        "version": __version__,
        "versions": versions(),
        "device": {
            "name": info.name,
            "backend": info.backend,
            "gfx": info.gfx,
            "reasons": list(info.reasons),
            "notes": list(info.notes),
        },
        "level": a1111_session.current().level,
        "attention": {
            **_usable(_never(info) or engine.known(device)),
            "in_use": ours is not None and ours.works,
            "chosen": None if ours is None else ours.in_use,
        },
        "unet": {
            **_usable(_never(info) or engine.known(device, LAYER_NORM)),
            "trouble": a1111_unet.trouble,
            "blocks": blocks(),
        },
        "several": a1111_several.told(),
        "vae": _usable(_never(info) or _vae(device)),
        "upscaler": _usable(_never(info) or engine.known(device, CONVS["3x3"])),
        "background": compiling(),
        "trials": tried(),
        "report": report.snapshot(),
        "speed_test": progress(session.progress()),
    }
    return plain(found)  # type: ignore[no-any-return]


def versions() -> dict[str, str | None]:
    """Versions of the software that this extension runs on; None where it is absent."""
    gradio = sys.modules.get("gradio")
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "hip": torch.version.hip,
        "gradio": getattr(gradio, "__version__", None),
    }


def blocks() -> list[dict[str, Any]]:
    """One entry per kind of UNet block, as last looked at: how many there are, how many are ours,
    why the others are not, and what within ours is not. Empty where none is taken over.
    """
    return [
        {
            "kind": row.kind,
            "total": row.total,
            "ours": row.ours,
            "left": {explained(why): count for why, count in row.left.items()},
            "partly": dict(row.partly),
        }
        for row in a1111_unet.rows
    ]


def compiling() -> dict[str, Any]:
    """The background's state; of its log, which is in the cache folder, the file's name."""
    now = background.state()
    return {
        "running": now.running,
        "done": now.done,
        "total": now.total,
        "failure": now.failure,
        "log": Path(now.log_path).name if now.log_path else "",
    }


def tried() -> dict[str, Any]:
    """How far trials of kernels are, and what they bar."""
    now = trials.state()
    return {
        "running": now.running,
        "done": now.done,
        "total": now.total,
        "kernel": now.subject,
        "halted": now.halted,
        "refused": [{"kernel": kernel, "reason": reason} for kernel, reason in now.refused],
    }


def progress(now: Progress) -> dict[str, Any]:
    """Progress of a speed test, for JSON."""
    return {"id": now.id, "state": now.state, "fraction": now.fraction, "text": now.text}


def plain(value: Any) -> Any:
    """`value` for JSON: paths are reduced to what they lead to, numbers are finite or None."""
    return _plain(value, _folders())


def _plain(value: Any, folders: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item, folders) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, folders) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int)):
        return value
    return _without_paths(str(value), folders)


def without_paths(text: str) -> str:
    """`text` with each absolute path replaced by its last part, a home folder by '~'."""
    return _without_paths(text, _folders())


def _without_paths(text: str, folders: list[str]) -> str:
    if "/" not in text and "\\" not in text:
        return text
    for folder in folders:
        if folder in text:
            text = re.sub(rf"{re.escape(folder)}(?![\w.-])", "~", text)
    text = _QUOTED.sub(lambda path: f"{path[1]}{path[2]}{path[1]}", text)
    return _POSIX.sub(_last, _WINDOWS.sub(_last, text))


def _folders() -> list[str]:
    """Folders of this machine whose names may have blanks in them; the longest first."""
    found = {cache.directory(), Path.cwd(), Path(sys.prefix), Path(__file__).parents[3]}
    data = host.attribute("modules.paths_internal", "data_path")
    found.add(Path(data) if data else None)
    try:
        found.add(Path.home())
    except RuntimeError:
        found.add(None)
    texts = {str(path) for path in found if path is not None and len(path.parts) > 1}
    return sorted(texts, key=len, reverse=True)


def _last(path: re.Match[str]) -> str:
    return "~" if _HOMES.search(path[0]) else path[1] or "~"


def _never(info: DeviceInfo) -> list[str]:
    """Why nothing of ours can run here, whatever is compiled and tested; empty if it may."""
    lacking = "; ".join(host.shortcomings())
    return [*info.reasons, *([f"this WebUI has no place for ours: {lacking}"] if lacking else [])]


def _usable(why_not: list[str] | None) -> dict[str, Any]:
    if why_not is None:
        return {"usable": None, "reasons": [NOT_YET]}
    return {"usable": not why_not, "reasons": why_not}


def _vae(device: torch.device) -> list[str] | None:
    why = engine.known(device, CONVS["3x3"])
    if why == [] and host.vae_dtype() == torch.float32:
        return [float32_reason()]
    return why
