"""Our nodes on the page of a real ComfyUI, in a browser.

ROCM_SD_COMFYUI names its checkout and ROCM_SD_COMFYUI_PAGE the folder of its page: `static` in the
package comfyui-frontend-package, of the version that the checkout's requirements.txt asks for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import launched
from tests.browser.conftest import ARTEFACTS
from tests.comfyui.server import running
from tests.comfyui.test_real_comfyui import checkout as checkout
from tests.comfyui.test_real_comfyui import python as python
from tests.comfyui.test_real_comfyui import with_nodes

PATIENCE_MS = 600_000
READY = "() => !!window.LiteGraph?.registered_node_types['RocmSdStatus'] && !!window.app?.graph"
DRAFT = "() => Object.values({...localStorage, ...sessionStorage}).some(s => s.includes('RocmSd'))"
SAID = ".rocm-sd-said"
OURS = """() => Object.fromEntries(window.app.graph._nodes
    .filter((node) => node.type.startsWith("RocmSd"))
    .map((node) => [node.type, (node.widgets ?? []).map((widget) => widget.value)]))"""
TO_STATUS = """() => {
    const node = window.app.graph._nodes.find((each) => each.type === "RocmSdStatus");
    window.app.canvas.centerOnNode(node);
    window.app.canvas.setDirty(true, true);
}"""


SAVED = """async (values) => {
    const place = `/api/workflow_templates/rocm_sd/rocm-sd-text-to-image.json`;
    const graph = await (await fetch(place)).json();
    const type = "RocmSdModel";
    if (values) graph.nodes.find((node) => node.type === type).widgets_values = values;
    await window.app.loadGraphData(graph);
    const made = (await window.app.graphToPrompt()).output;
    return Object.values(made).find((node) => node.class_type === type).inputs;
}"""
"""Loads the example from the templates, with these values saved; gives what is sent of our node."""


@pytest.fixture(scope="module")
def page_folder() -> Path:
    place = os.environ.get("ROCM_SD_COMFYUI_PAGE")
    if not place:
        pytest.skip("ROCM_SD_COMFYUI_PAGE names no folder of ComfyUI's page")
    assert (Path(place) / "index.html").is_file(), f"no page of ComfyUI is in {place}"
    return Path(place).resolve()


@pytest.fixture
def page(checkout: Path, python: str, page_folder: Path, tmp_path: Path) -> Iterator[Any]:  # noqa: F811
    with (
        running(checkout, python, tmp_path / "page", page=page_folder) as server,
        launched() as browser,
    ):
        found = browser.new_context(viewport={"width": 1400, "height": 900}).new_page()
        found.set_default_timeout(PATIENCE_MS)
        found.goto(server.address)
        found.wait_for_function(READY)
        yield found


def test_nodes_say_on_the_page_what_runs_and_survive_a_reload(page: Any) -> None:
    page.evaluate("(made) => window.app.loadApiJson(made, 'test')", with_nodes("Auto", "Auto"))
    box = page.locator(SAID)
    assert box.input_value() == "" and not box.is_editable()
    page.evaluate("() => window.app.queuePrompt(0, 1)")
    page.wait_for_function("(at) => document.querySelector(at).value.length > 0", arg=SAID)
    said = box.input_value()
    assert said.startswith("Not active: no supported GPU (this is the CPU)")
    assert "VAE decode: 0 of 2 calls ours" in said
    sent = page.evaluate("async () => (await window.app.graphToPrompt()).output['12'].inputs")
    assert list(sent) == ["after"]

    page.keyboard.press("Escape")  # a first visit is offered templates
    page.evaluate(TO_STATUS)
    page.wait_for_timeout(500)
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=ARTEFACTS / "comfyui-status.png")

    sent = page.evaluate(SAVED, ["Auto", True, "Off"])
    assert sent == {"model": ["4", 0], "level": "Auto", "attention": True, "unet": "Off"}
    assert page.evaluate(SAVED, ["Auto", True])["unet"] == "Auto"  # saved before there was `unet`
    page.evaluate("(made) => window.app.loadApiJson(made, 'test')", with_nodes("Auto", "Auto"))
    before = page.evaluate(OURS)
    assert before["RocmSdModel"] == ["Auto", True, "Auto"]
    assert before["RocmSdVae"] == ["Auto", "Auto", 0, True, True]
    page.wait_for_function(DRAFT)
    page.reload()
    page.wait_for_function(READY)
    page.wait_for_function("() => window.app.graph._nodes.length > 0")
    assert page.evaluate(OURS) == {**before, "RocmSdStatus": [""]}
