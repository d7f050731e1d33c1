"""Pictures of the real ComfyUI's page: the example workflow, and the status after a workflow.

python -m tools.comfyui_pictures [--python PYTHON] --page FOLDER CHECKOUT

CHECKOUT: a ComfyUI, which runs on the CPU with PYTHON. FOLDER: `static` of the package
comfyui-frontend-package. It writes docs/images/comfyui-workflow.png and comfyui-status.png, and the
thumbnail beside the workflow, which ComfyUI's template browser shows. Needs playwright, chromium.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from tests.browser.chromium import ARGUMENTS, BROWSERS
from tests.browser.pictures import COLOURS, IMAGES, ROUNDS
from tests.comfyui.server import running
from tests.comfyui.test_real_comfyui import with_nodes
from tests.comfyui.test_real_comfyui_page import PATIENCE_MS, READY

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "example_workflows" / "rocm-sd-text-to-image.json"
VIEWPORT = {"width": 1900, "height": 1050}
MARGIN_PX, TITLE_PX = 14, 50
"""Around nodes; and above them, where their titles and marks are."""
THUMBNAIL = 640
LOAD = """async (workflow) => {
    await window.app.extensionManager.setting.set("Comfy.Minimap.Visible", false);
    await window.app.loadGraphData(workflow);
}"""
BOX = """([type, margin, title]) => {
    const {canvas, graph} = window.app;
    const nodes = graph._nodes.filter((each) => !type || each.type === type);
    const least = (at) => Math.min(...nodes.map((node) => node.pos[at]));
    const most = (at) => Math.max(...nodes.map((node) => node.pos[at] + node.size[at]));
    canvas.ds.scale = 1;
    canvas.ds.offset = [margin - least(0) + 100, title - least(1) + 100];
    canvas.setDirty(true, true);
    const {x, y} = canvas.canvas.getBoundingClientRect();
    return {x: x + 100, y: y + 100, width: most(0) - least(0) + 2 * margin,
            height: most(1) - least(1) + margin + title};
}"""
"""Brings nodes into sight and gives the place that they take on the page."""


def main(argv: list[str]) -> int:
    """Take them. Returns 0."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    asked = parser.parse_args(argv)
    chromium = next(path for path in map(shutil.which, BROWSERS) if path)
    with (
        tempfile.TemporaryDirectory() as folder,
        running(asked.checkout, asked.python, Path(folder) / "comfyui", page=asked.page) as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=chromium, args=list(ARGUMENTS))
        page = browser.new_context(viewport=VIEWPORT).new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(server.address)
        page.wait_for_function(READY)
        page.wait_for_timeout(2000)
        page.keyboard.press("Escape")  # a first visit is offered templates
        page.evaluate("(made) => window.app.loadApiJson(made, 'test')", with_nodes("Auto", "Auto"))
        page.evaluate("() => window.app.queuePrompt(0, 1)")
        said = ".rocm-sd-said"
        page.wait_for_function("(at) => document.querySelector(at).value.length > 0", arg=said)
        keep(page, "comfyui-status", "RocmSdStatus")
        page.evaluate(LOAD, json.loads(EXAMPLE.read_text("utf-8")))
        shown = keep(page, "comfyui-workflow")
        with Image.open(shown) as image:
            small = image.convert("RGB")
        small.thumbnail((THUMBNAIL, THUMBNAIL))
        small.save(EXAMPLE.with_suffix(".jpg"), quality=80, optimize=True)
        browser.close()
    return 0


def keep(page: Any, name: str, node: str = "") -> Path:
    """A picture of the graph's nodes, or of those of one type, in docs/images."""
    page.wait_for_timeout(1500)  # until the page has moved them to where it wants them
    clip = page.evaluate(BOX, [node, MARGIN_PX, TITLE_PX])
    page.wait_for_timeout(500)
    path = IMAGES / f"{name}.png"
    page.screenshot(path=path, clip=clip)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(COLOURS, kmeans=ROUNDS)
    small.save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size >> 10} KiB")
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
