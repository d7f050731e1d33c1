"""A script of the WebUI's, for tools/webui_trials.py: it plants faults, counts and times.

$ROCM_SD_PROBE_LIBRARY: the checkout whose library is watched. $ROCM_SD_PROBE_PLANT: a file that
holds the folder of changed kernels to use instead of kernels/ for attention of HEAD_DIM, empty for
none; with "parent " before it only this process's own launches get them, not what is tried.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from modules import script_callbacks

sys.path.insert(0, os.environ["ROCM_SD_PROBE_LIBRARY"])

from lib_rocm_sd.engine import selftest
from lib_rocm_sd.hosts.webui import register
from lib_rocm_sd.runtime import build, launcher

HEAD_DIM = ("HEAD_DIM", 40)
PARENT = "parent "
seen: dict[str, list[float]] = {}
"""Milliseconds of each call of what is watched."""


def plant() -> str:
    file = os.environ.get("ROCM_SD_PROBE_PLANT", "")
    return Path(file).read_text(encoding="utf-8").strip() if file else ""


def changed(spec: Any, *, parent: bool) -> Any:
    """The kernel to use for `spec`, planted where that is asked for."""
    folder = plant()
    if spec.source != "attention.hip" or HEAD_DIM not in spec.defines:
        return spec
    if not folder or folder.startswith(PARENT) != parent:
        return spec
    return replace(spec, source=f"{folder.removeprefix(PARENT)}/{spec.source}")


def planting(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def called(spec: Any, *others: Any) -> Any:
        return real(changed(spec, parent=False), *others)

    return called


def timed(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    times = seen.setdefault(name, [])

    @functools.wraps(real)
    def called(*arguments: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return real(*arguments, **named)
        finally:
            times.append(1e3 * (time.perf_counter() - begin))

    return called


def first_use() -> None:
    """What the WebUI pays when it loads a model, and else the first self-test would seem to."""
    import torch

    x = torch.randn(64, 64, device="cuda", dtype=torch.float16)
    (x @ x).float().to("cpu")


def watch() -> None:
    build.build, build.cached = planting(build.build), planting(build.cached)
    real_code = launcher.Launcher._code

    def code(self: Any, spec: Any) -> bytes:
        return real_code(self, changed(spec, parent=True))

    launcher.Launcher._code = code  # type: ignore[method-assign]
    timed("first use of the card", first_use)()
    selftest.check = timed("second look", selftest.check)
    try:
        from lib_rocm_sd.hosts.webui.trials import Trials
        from lib_rocm_sd.trials import link
    except ImportError:  # a checkout from before there were trials
        return
    Trials.begin = timed("gate, begin", Trials.begin)  # type: ignore[method-assign]
    Trials.expect = timed("gate, expect", Trials.expect)  # type: ignore[method-assign]
    link.Link.__init__ = timed("child", link.Link.__init__)  # type: ignore[method-assign]


def routes(_demo: Any, app: Any) -> None:
    app.add_api_route("/probe/seen", lambda: seen, methods=["GET"])


if not hasattr(register, "is_probed"):
    register.is_probed = True  # type: ignore[attr-defined]
    watch()
script_callbacks.on_app_started(routes)
