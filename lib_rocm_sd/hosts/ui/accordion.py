"""The accordion in txt2img and img2img: its controls, as gradio shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from html import escape
from typing import Any, NamedTuple

from lib_rocm_sd.hosts.ui import status as page
from lib_rocm_sd.hosts.ui.options import (
    BUDGET_LABEL,
    CARDS_LABEL,
    DEFAULTS,
    LEVEL_LABEL,
    SEVERAL_LABEL,
    SEVERAL_MODES,
    UNET_LABEL,
    UNET_MODES,
    UPSCALER_LABEL,
    UPSCALER_MODES,
    VAE_LABEL,
    VAE_MODES,
    Options,
    parse,
)
from lib_rocm_sd.hosts.ui.status import Status
from lib_rocm_sd.policy import LEVELS

Look = Callable[[Options], Status]
"""What the host says of the state, were a picture made with these options now."""
Check = Callable[[], str]
"""Has tried again what a trial has barred; what was done, in a sentence."""

EXPLANATIONS = {
    "Auto": "Likely the fastest, within half of the free memory.",
    "Performance": "Measures what is fastest here, once for each picture size.",
    "Memory": "Uses as little memory as possible, at some cost in speed.",
}
TOOLTIPS = {
    "enable": (
        "Off: pictures are exactly as without this extension, bit for bit. "
        "Takes effect with the next generation."
    ),
    "level": (
        "Auto: picks what should be fastest, within half of the free memory. "
        "Performance: measures what is fastest on your card, once for each new size, between "
        "pictures. "
        "Memory: uses as little memory as possible."
    ),
    "vae": (
        "Which code turns latents into pictures and back. Off: the WebUI's own. Auto: this "
        "extension, the whole picture at once if it fits into memory, otherwise in bands. Always "
        "banded: this extension, in bands. Bands give the same picture, without seams. They take "
        "less memory and more time."
    ),
    "vae_budget": (
        "How much video memory the VAE may use for one picture, in MiB, in addition to its "
        "weights. 0: as much as the optimization level allows."
    ),
    "unet": (
        "Which code runs the UNet, the model behind every sampling step. Off: the WebUI's own "
        "(attention may still be ours). Auto: this extension, for every block that it supports "
        "and whose weights are in half precision."
    ),
    "several": (
        "Share the work with your other GPUs: part of every step, and part of the VAE for large "
        "images. Auto: only where measurements show that this is faster. Each card keeps a copy "
        "of the UNet. The pictures are the same except for rounding."
    ),
    "several_cards": (
        "Device numbers of the additional GPUs, as listed by the driver, for instance 1, 2. "
        "Empty: all that this extension supports."
    ),
    "upscaler": (
        "Which code runs the upscaling networks (ESRGAN, Real-ESRGAN and the like) of hires fix, "
        "img2img and scripts. Off: the WebUI's own, in its tiles. Auto: this extension, for every "
        "network that it supports, without tiles and so without seams."
    ),
}


class Controls(NamedTuple):
    """The gradio components whose values a script is called with, in the order of Options."""

    enable: Any
    level: Any
    vae: Any
    budget: Any
    unet: Any
    several: Any
    cards: Any
    upscaler: Any


def explanation_html(level: str) -> str:
    """The line that explains a level."""
    return f'<span class="rocm-sd-explanation">{escape(EXPLANATIONS[level])}</span>'


def _controls(elem_id: Callable[[str], str]) -> tuple[Controls, Any]:
    """What people choose by, and the line that explains the level."""
    import gradio as gr

    def choice(name: str, choices: Iterable[str], label: str) -> Any:
        default = getattr(DEFAULTS, name)
        return gr.Radio(list(choices), value=default, label=label, elem_id=elem_id(name))

    enable = gr.Checkbox(DEFAULTS.enable, label="Enable", elem_id=elem_id("enable"))
    level = choice("level", LEVELS, LEVEL_LABEL)
    explanation = gr.HTML(explanation_html(DEFAULTS.level), elem_id=elem_id("explanation"))
    with gr.Row():
        unet = choice("unet", UNET_MODES, UNET_LABEL)
        vae = choice("vae", VAE_MODES, VAE_LABEL)
        budget = gr.Number(
            DEFAULTS.budget_mib,
            label=BUDGET_LABEL,
            precision=0,
            minimum=0,
            elem_id=elem_id("vae_budget"),
        )
    with gr.Row():
        upscaler = choice("upscaler", UPSCALER_MODES, UPSCALER_LABEL)
        several = choice("several", SEVERAL_MODES, SEVERAL_LABEL)
        cards = gr.Textbox(
            DEFAULTS.cards, label=CARDS_LABEL, max_lines=1, elem_id=elem_id("several_cards")
        )
    controls = Controls(enable, level, vae, budget, unet, several, cards, upscaler)
    for component, name in zip(controls, TOOLTIPS, strict=True):
        component.webui_tooltip = TOOLTIPS[name]  # where the WebUI's constructors keep `tooltip`
    return controls, explanation


def build(elem_id: Callable[[str], str], look: Look, check: Check) -> Controls:
    """Create the components in gradio's current context.

    `look` is asked now, when a control changes, and when the hidden button is clicked, which
    rocm_sd.js does when the page is loaded, after each generation and while kernels are compiled.
    `check` is called by a button that is there where the state names a risk.
    """
    import gradio as gr

    first = look(DEFAULTS)
    frame = gr.Accordion(
        page.title(first), open=False, elem_id=elem_id("accordion"), elem_classes=["rocm-sd"]
    )
    with frame:
        controls, explanation = _controls(elem_id)
        stale = f'<div class="rocm-sd-stale">{page.html(first)}</div>'  # rocm_sd.js renews it
        line = gr.HTML(stale, elem_id=elem_id("status"))
        checks = gr.Button(page.CHECK, visible=bool(first.risk), elem_id=elem_id("check"))
        again = gr.Button(
            "Refresh", visible=False, elem_id=elem_id("refresh"), elem_classes=["rocm-sd-refresh"]
        )
    for button in (again, checks):
        button.do_not_save_to_config = True  # ui-config.json is for what people choose

    def refreshed(*values: Any) -> tuple[Any, str, str, Any]:
        options, _ = parse(*values)
        return shown(options, look(options))

    def checked(*values: Any) -> tuple[Any, str, str, Any]:
        said, (options, _) = check(), parse(*values)
        status = look(options)
        return shown(options, replace(status, lines=(said, *status.lines)))

    def shown(options: Options, status: Status) -> tuple[Any, str, str, Any]:
        label = gr.update(label=page.title(status))
        button = gr.update(visible=bool(status.risk))
        return label, explanation_html(options.level), page.html(status), button

    result = {"outputs": [frame, explanation, line, checks], "queue": False}
    for trigger in (again.click, *(control.change for control in controls)):
        trigger(fn=refreshed, inputs=list(controls), show_progress="hidden", **result)
    checks.click(fn=checked, inputs=list(controls), **result)
    return controls
