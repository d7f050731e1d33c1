"""What the tests of the page share."""

from __future__ import annotations

from typing import Any

from conftest import WebUI

TITLE = "ROCm SD Optimization"


def script(webui: WebUI, tab: str = "txt2img") -> Any:
    return getattr(webui.scripts, f"scripts_{tab}").script(TITLE)


def components(webui: WebUI, kind: str) -> list[dict[str, Any]]:
    config = webui.shared.demo.get_config_file()
    return [c["props"] for c in config["components"] if c["type"] == kind]


def by_id(webui: WebUI, elem_id: str) -> dict[str, Any]:
    """The one component with this elem_id, as the browser gets it."""
    config = webui.shared.demo.get_config_file()["components"]
    (found,) = [c for c in config if c["props"].get("elem_id") == elem_id]
    return found  # type: ignore[no-any-return]


def events(webui: WebUI, component_id: int, event: str) -> list[Any]:
    """The functions that an event of a component calls."""

    def triggers(dependency: dict[str, Any]) -> list[tuple[Any, ...]]:
        if dependency.get("trigger"):  # gradio 3
            return [(target, dependency["trigger"]) for target in dependency["targets"]]
        return [tuple(target) for target in dependency["targets"]]

    demo = webui.shared.demo
    found = demo.get_config_file()["dependencies"]
    wanted = (component_id, event)
    return [demo.fns[i].fn for i, dependency in enumerate(found) if wanted in triggers(dependency)]


def refresh(webui: WebUI, *values: Any, tab: str = "txt2img") -> tuple[str, str, str]:
    """What the hidden button of the accordion gives: title line, explanation, status.

    `values` as the controls have them, those that are missing as they were at first.
    """
    button = by_id(webui, f"script_{tab}_rocm_sd_optimization_refresh")
    (function,) = events(webui, button["id"], "click")
    shown = [*values, *(control.value for control in script(webui, tab).controls[len(values) :])]
    label, explanation, status, _ = function(*shown)
    return label["label"], explanation, status
