"""The accordion in txt2img and img2img: its controls, as gradio shows them."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lib_rocm_sd.policy import LEVELS
from lib_rocm_sd.ui.options import (
    BUDGET_LABEL,
    DEFAULTS,
    LEVEL_LABEL,
    TITLE,
    VAE_LABEL,
    VAE_MODES,
)

TOOLTIPS = {
    "level": (
        "Auto: what is expected to be fastest, within half of the free memory. "
        "Performance: measures what is fastest on your card, once for each new size. "
        "Memory: as little memory as possible."
    ),
    "vae": (
        "Who turns latents into pictures and back. Off: the WebUI. Auto: this extension, the whole "
        "picture at once where it fits into memory, else in bands. Always banded: in bands. "
        "Bands give the same picture, without seams; they take less memory and more time."
    ),
    "vae_budget": (
        "The video memory that the VAE may take for one picture beside its weights, in MiB. "
        "0: what the optimization level allows."
    ),
}


@dataclass(frozen=True)
class Controls:
    """The gradio components of one accordion."""

    enable: Any
    level: Any
    vae: Any
    budget: Any
    status: Any

    @property
    def arguments(self) -> list[Any]:
        """The components whose values a script is called with, in the order of Options."""
        return [self.enable, self.level, self.vae, self.budget]


def status_html(text: str) -> str:
    """The status as HTML, a paragraph for each line."""
    return "".join(f"<p>{html.escape(line)}</p>" for line in text.splitlines())


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
            controls = Controls(enable, *_inside(gr, elem_id, status))
    else:
        with gr.Accordion(TITLE, open=False, elem_id=elem_id("accordion")):
            enable = gr.Checkbox(DEFAULTS.enable, label="Enable", elem_id=elem_id("enable"))
            controls = Controls(enable, *_inside(gr, elem_id, status))
    for control in controls.arguments:
        control.change(
            fn=lambda: status_html(status()),
            outputs=[controls.status],
            queue=False,
            show_progress="hidden",
        )
    return controls


def _inside(gr: Any, elem_id: Callable[[str], str], status: Callable[[], str]) -> tuple[Any, ...]:
    """All but Enable, from top to bottom."""

    def radio(name: str, label: str, choices: list[str], value: str) -> Any:
        made = gr.Radio(choices, value=value, label=label, elem_id=elem_id(name))
        return _with_tooltip(made, name)

    level = radio("level", LEVEL_LABEL, list(LEVELS), DEFAULTS.level)
    with gr.Row():
        vae = radio("vae", VAE_LABEL, list(VAE_MODES), DEFAULTS.vae)
        budget = gr.Number(
            DEFAULTS.budget_mib,
            label=BUDGET_LABEL,
            precision=0,
            minimum=0,
            elem_id=elem_id("vae_budget"),
        )
    line = gr.HTML(value=lambda: status_html(status()), elem_id=elem_id("status"))
    return level, vae, _with_tooltip(budget, "vae_budget"), line


def _with_tooltip(component: Any, name: str) -> Any:
    """As the WebUI's own constructors leave it; plain gradio knows no `tooltip`."""
    component.webui_tooltip = TOOLTIPS[name]
    return component
