"""`python -m tests.browser.pictures`: renews the pictures of the accordion in docs/images.

They show the WebUI's double with A1111's gradio, the CPU in a GPU's place: what the page looks
like. Those of the real WebUI are made by `tools/screenshots.py`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.browser.chromium import ARGUMENTS, BROWSERS
from tests.browser.pages import Visit
from tests.browser.served import Served
from tests.webui.environments import A1111, CHECKOUT, prepare

IMAGES = CHECKOUT / "docs" / "images"
WIDTH = 960
MARGIN_PX = 8
COLOURS = 256
ROUNDS = 3
"""Of choosing the colours again; with none of them and fewer colours some emoji were grey."""


def main() -> int:
    """0, or 1 with the reason on standard error."""
    from playwright.sync_api import sync_playwright

    path = next((path for path in map(shutil.which, BROWSERS) if path), None)
    problem = prepare(A1111) if path else "there is no chromium"
    if problem:
        print(problem, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        with Served(A1111, Path(folder) / "webui") as served:
            viewport = {"width": WIDTH, "height": 800}
            for theme in ("light", "dark"):
                page = Visit(browser, served.address, theme, viewport)
                page.open_accordion()
                keep(page, page.ours("accordion"), f"accordion-{theme}")
        browser.close()
    return 0


def keep(page: Visit, selector: str, name: str, until: str = "") -> None:
    """A picture of a part of the page; `until`: of what is above this part of it only."""
    page.page.mouse.move(0, 0)
    page.page.wait_for_timeout(500)
    box = page.page.locator(selector).first.bounding_box()
    if until:
        box["height"] = page.page.locator(until).first.bounding_box()["y"] - box["y"]
    clip = {
        "x": max(box["x"] - MARGIN_PX, 0),
        "y": max(box["y"] - MARGIN_PX, 0),
        "width": box["width"] + 2 * MARGIN_PX,
        "height": box["height"] + (0 if until else 2 * MARGIN_PX),
    }
    path = IMAGES / f"{name}.png"
    page.page.screenshot(path=path, full_page=True, clip=clip, animations="disabled")
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(COLOURS, kmeans=ROUNDS)
    small.save(path, optimize=True)
    print(f"{path.relative_to(CHECKOUT)}: {path.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    sys.exit(main())
