"""A whole real WebUI as people start it, on the CPU: asked over HTTP, and looked at in a browser.

ROCM_SD_WEBUI_LAUNCHER names what starts it (launch.py of a checkout whose repositories are there),
ROCM_SD_WEBUI_PYTHON the Python that has what it needs, ROCM_SD_WEBUI_FLAGS its flags: a checkpoint,
and that it is to use the CPU.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser.chromium import launched
from tests.browser.conftest import ARTEFACTS
from tests.browser.pages import Visit
from tools.webui_client import PICTURE, ROOT, SCRIPT, Client
from tools.webui_process import Running, started

LAUNCHER = "ROCM_SD_WEBUI_LAUNCHER"
READY = ("Startup time:", "Model loaded in")
SMALL = {"width": 64, "height": 64, "steps": 2}
WHY = "no supported GPU (this is the CPU)"


@contextmanager
def served(data: Path, *, ours: bool) -> Iterator[Running]:
    """With its page and its API."""
    launcher = os.environ.get(LAUNCHER)
    if not launcher:
        pytest.skip(f"{LAUNCHER} names nothing that starts a WebUI")
    (data / "extensions").mkdir(parents=True)
    if ours:
        (data / "extensions" / "rocm-sd").symlink_to(ROOT, target_is_directory=True)
    environment = {"SD_WEBUI_RESTARTING": "1", "ROCM_SD_CACHE_DIR": str(data / "cache")}
    flags = ["--api", *shlex.split(os.environ.get("ROCM_SD_WEBUI_FLAGS", ""))]
    python = os.environ.get("ROCM_SD_WEBUI_PYTHON", "python")
    with started(python, Path(launcher), data, flags, environment, READY) as running:
        yield running


def painted(client: Client, args: list[Any] | None = None) -> tuple[Any, str]:
    """A small picture's pixels and infotext; `args`: of our script."""
    scripts = {} if args is None else {SCRIPT: {"args": args}}
    made = client.make({**PICTURE, **SMALL, "alwayson_scripts": scripts})
    (pixels,) = made.frames
    return pixels, made.infotext


@pytest.mark.slow
def test_on_a_cpu_it_is_as_without_us_and_says_why(tmp_path: Path) -> None:
    with served(tmp_path / "without", ours=False) as running:
        theirs, _ = painted(Client(running, 0.0))
    with served(tmp_path / "with", ours=True) as running:
        client = Client(running, 0.0)
        assert np.array_equal(painted(client)[0], theirs)
        for args in ([True, "Auto", "Auto", 0, "Auto"], [False]):
            pixels, said = painted(client, args)
            assert np.array_equal(pixels, theirs) and "rocm_sd" not in said
        assert "lib_rocm_sd" not in running.said, "a traceback of ours, or a warning"
        with launched() as browser:
            page = Visit(browser, running.address, "dark", {"width": 1280, "height": 900})
            page.show_tab("txt2img")
            page.part("accordion").locator(".label-wrap").click()
            page.wait_for_text(page.ours("status"), WHY.replace("(", r"\(").replace(")", r"\)"))
            ARTEFACTS.mkdir(parents=True, exist_ok=True)
            page.page.screenshot(path=ARTEFACTS / "real-webui-cpu.png")
            page.load()
            assert not [error for error in page.errors if "404" not in error], "404: its own files"
            page.close()
