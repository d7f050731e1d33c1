"""The accordion in txt2img and img2img: its controls, as arguments and in an infotext, too."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lib_rocm_sd.policy import LEVELS

TITLE = "ROCm SD Optimization"
INFOTEXT_KEY = "ROCm SD"
OFF = "off"
_TRUE = ("true", "1", "on", "yes")
_FALSE = ("false", "0", OFF, "no")


@dataclass(frozen=True)
class Options:
    """What a generation asks of us, in the order of the script's arguments."""

    enable: bool = True
    level: str = "Auto"

    def infotext(self, what_ran: str) -> str:
        """The value of `INFOTEXT_KEY`, for instance 'Auto, attention: rocm_sd'."""
        if not self.enable:
            return OFF
        return ", ".join(part for part in (self.level, what_ran) if part)


DEFAULTS = Options()


@dataclass(frozen=True)
class Controls:
    """The gradio components of one accordion."""

    enable: Any
    level: Any
    status: Any


def parse(*args: Any) -> tuple[Options, list[str]]:
    """The options that a script's arguments mean, and what was wrong with them.

    Missing arguments and None are the defaults; so is what cannot be understood, with a message.
    """
    messages: list[str] = []
    enable, level = [*args[:2], None, None][:2]
    if len(args) > 2:
        messages.append(f"{len(args)} arguments were given, Enable and Optimization Level are used")
    return Options(_enable(enable, messages), _level(level, messages)), messages


def _enable(value: Any, messages: list[str]) -> bool:
    if value is None or isinstance(value, bool):
        return DEFAULTS.enable if value is None else value
    word = str(value).strip().lower() if isinstance(value, (str, int, float)) else ""
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    messages.append(f"Enable is {value!r}, expected true or false; {DEFAULTS.enable} is used")
    return DEFAULTS.enable


def _level(value: Any, messages: list[str]) -> str:
    if value is None:
        return DEFAULTS.level
    for level in LEVELS:
        if isinstance(value, str) and value.strip().lower() == level.lower():
            return level
    known = ", ".join(LEVELS)
    messages.append(
        f"Optimization Level is {value!r}, expected one of {known}; {DEFAULTS.level} is used"
    )
    return DEFAULTS.level


def enable_from(infotext: Mapping[str, Any]) -> bool | None:
    """Enable as a pasted infotext has it; None, which changes nothing, if it has none."""
    text = infotext.get(INFOTEXT_KEY)
    return None if text is None else str(text).strip().lower() != OFF


def level_from(infotext: Mapping[str, Any]) -> str | None:
    """The level as a pasted infotext has it; None where it names none."""
    word = str(infotext.get(INFOTEXT_KEY, "")).split(",")[0].strip().lower()
    return next((level for level in LEVELS if level.lower() == word), None)


def status_html(text: str) -> str:
    """The status line as HTML."""
    return f"<p>{html.escape(text)}</p>"


def build(
    elem_id: Callable[[str], str], status: Callable[[], str], input_accordion: Any = None
) -> Controls:
    """Create the components in gradio's current context.

    `input_accordion`: the WebUI's InputAccordion, or None where it has none. `status` is asked when
    the page is loaded and when a control changes.
    """
    import gradio as gr

    if input_accordion is not None:
        frame = input_accordion(DEFAULTS.enable, label=TITLE, elem_id=elem_id("enable"))
        with frame as enable:
            level, line = _inside(gr, elem_id, status)
    else:
        with gr.Accordion(TITLE, open=False, elem_id=elem_id("accordion")):
            enable = gr.Checkbox(DEFAULTS.enable, label="Enable", elem_id=elem_id("enable"))
            level, line = _inside(gr, elem_id, status)
    for control in (enable, level):
        control.change(
            fn=lambda: status_html(status()), outputs=[line], queue=False, show_progress="hidden"
        )
    return Controls(enable, level, line)


def _inside(gr: Any, elem_id: Callable[[str], str], status: Callable[[], str]) -> tuple[Any, Any]:
    level = gr.Radio(
        list(LEVELS), value=DEFAULTS.level, label="Optimization Level", elem_id=elem_id("level")
    )
    return level, gr.HTML(value=lambda: status_html(status()), elem_id=elem_id("status"))
