"""What we add to ComfyUI's page, in a browser, with stand-ins for ComfyUI's script and its nodes.

A real page is looked at where there is one: tests/comfyui/test_real_comfyui_page.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.webui.environments import CHECKOUT

SCRIPT = CHECKOUT / "lib_rocm_sd/hosts/comfyui/web/rocm_sd.js"
ORIGIN = "http://127.0.0.1:9"
APP = """export const app = {registerExtension: (given) => { window.extension = given; }};"""
NODE = """() => {
    window.Node = class {
        size = [200, 50];
        heard = [];
        onNodeCreated(...given) { this.heard.push(["created", ...given]); return "made"; }
        onExecuted(message) { this.heard.push(["executed", message]); }
        setSize(size) { this.size = size; }
        addDOMWidget(name, type, element, options) {
            document.body.append(element);
            return this.widget = {name, type, element, options};
        }
    };
}"""


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    context = chromium.new_context()
    found = context.new_page()
    errors: list[str] = []
    found.on("pageerror", lambda error: errors.append(str(error)))
    served = {
        "/": ("text/html", "<body></body>"),
        "/scripts/app.js": ("text/javascript", APP),
        "/extensions/rocm_sd/rocm_sd.js": ("text/javascript", SCRIPT.read_text("utf-8")),
    }
    for path, (kind, body) in served.items():
        found.route(f"{ORIGIN}{path}", _answering(kind, body))
    found.goto(f"{ORIGIN}/")
    found.evaluate("async () => { await import('/extensions/rocm_sd/rocm_sd.js'); }")
    found.evaluate(NODE)
    yield found
    context.close()
    assert errors == []


def _answering(kind: str, body: str) -> Any:
    return lambda route: route.fulfill(content_type=kind, body=body)


def test_what_a_node_said_stands_on_it_and_in_nothing_else(page: Any) -> None:
    found = page.evaluate("""() => {
        window.extension.beforeRegisterNodeDef(window.Node, {name: "RocmSdStatus"});
        const node = new window.Node();
        const made = node.onNodeCreated(1);
        node.onExecuted({text: ["first line", "second line"]});
        node.onExecuted({});
        node.onExecuted(undefined);
        const {element, ...widget} = node.widget;
        return {made, size: node.size, heard: node.heard.length, said: element.value,
                fixed: element.readOnly, hint: element.placeholder, widget};
    }""")
    assert found["said"] == "first line\nsecond line" and found["fixed"] and found["hint"]
    assert (found["made"], found["heard"]) == ("made", 4)
    assert found["size"] == [460, 220]
    widget = found["widget"]
    assert widget["serialize"] is False and widget["options"]["serialize"] is False


def test_nodes_of_others_and_pages_without_such_boxes_are_left_alone(page: Any) -> None:
    found = page.evaluate("""() => {
        const before = window.Node.prototype.onExecuted;
        window.extension.beforeRegisterNodeDef(window.Node, {name: "KSampler"});
        const untouched = window.Node.prototype.onExecuted === before;
        delete window.Node.prototype.addDOMWidget;
        window.extension.beforeRegisterNodeDef(window.Node, {name: "RocmSdSpeedTest"});
        const node = new window.Node();
        const made = node.onNodeCreated();
        node.onExecuted({text: ["a line"]});
        return [untouched, made, node.heard.length, node.size];
    }""")
    assert found == [True, "made", 2, [200, 50]]
