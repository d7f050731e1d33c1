"""Pictures of the real WebUI's page: docs/images/real-webui.png and speed-test.png.

python -m tools.screenshots [--python PYTHON] [--result FILE] CHECKOUT --ckpt MODEL [FLAG ...]

CHECKOUT: AUTOMATIC1111's WebUI or its AMD fork, ready to start with PYTHON. What follows goes to
it; without a GPU it wants `--use-cpu all --no-half --precision full`. It runs in a data folder of
its own. On a GPU it first makes pictures until all kernels are tried, so that the page shows what
runs. The Speed test tab shows FILE, as it shows the last result of its folder after a start.
Needs playwright, chromium, and a font that has emoji.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from lib_rocm_sd.hosts.ui.speed_tab import TITLE
from lib_rocm_sd.hosts.webui.speedtest import FOLDER
from lib_rocm_sd.lab.speed_result import read
from tests.browser.chromium import ARGUMENTS, BROWSERS
from tests.browser.pages import PARTS, TRANSITION_MS, Visit
from tests.browser.pictures import keep
from tools.webui_client import PICTURE, SCRIPT, Client
from tools.webui_process import started

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "docs/results/speed-test-h200.json"
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 900, "height": 800}
LAUNCHER = "launch.py"
UNET = "Auto"
OURS = {SCRIPT: {"args": [True, "Auto", "Auto", 0, UNET]}}
NEXT_SCRIPT = "#script_list"
"""What comes below the accordion."""


def main(argv: list[str]) -> int:
    """Take both pictures. Returns 0."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="the WebUI's own")
    asked = parser.parse_args(argv)
    path = next(path for path in map(shutil.which, BROWSERS) if path)
    with (
        tempfile.TemporaryDirectory() as folder,
        started(
            asked.python,
            asked.checkout / LAUNCHER,
            _data(Path(folder), asked.result),
            ["--api", *asked.flags],
        ) as webui,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        client = Client(webui, time.monotonic())
        has_card = not client.status()["device"]["reasons"]
        if has_card:
            client.settle(lambda: client.make(PICTURE | {"alwayson_scripts": OURS}))
        visit = Visit(browser, webui.address, "dark", WIDE)
        visit.part("accordion").locator(".label-wrap").click()
        for name in PARTS:
            visit.part(name).wait_for(state="visible")
        if has_card:
            visit.choose("unet", UNET)
        visit.page.wait_for_timeout(TRANSITION_MS)
        keep(visit, "gradio-app", "real-webui", NEXT_SCRIPT)
        visit.page.set_viewport_size(NARROW)
        visit.show_tab(TITLE)
        visit.wait_for_results()
        keep(visit, visit.speed("column"), "speed-test", visit.speed("looks"))
        browser.close()
    return 0


def _data(folder: Path, result: Path) -> Path:
    """A data folder with this extension, and with `result` as the Speed test's last one."""
    extensions = folder / "extensions"
    extensions.mkdir()
    (extensions / "rocm-sd-optimization").symlink_to(ROOT, target_is_directory=True)
    read(result).write(folder / "outputs" / FOLDER)
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
