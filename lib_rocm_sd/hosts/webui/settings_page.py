"""Our section in the WebUI's settings: what it shows, and what a change does at once."""

from __future__ import annotations

import logging
from html import escape
from typing import Any

from lib_rocm_sd import cache
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.hosts.ui.status import counted
from lib_rocm_sd.hosts.webui import host, session, settings
from lib_rocm_sd.hosts.webui.seams import optimizer
from lib_rocm_sd.hosts.webui.trials import trials
from lib_rocm_sd.runtime import background, launcher

SECTION = ("rocm_sd", host.NAME)
CACHE_KEY = "rocm_sd_cache"
COMPILED = ("code", "index", "compilers", "tried")
"""The kinds of cache entries that a compilation makes, and the note that all of it was tried."""
BUSY = "A picture is being generated. Try again when it finishes."
COMPILING = "Kernels are being compiled. Try again when that finishes."
TRYING = "Kernels are being tried. Try again when that finishes."
ABOUT = (
    "Kernels are compiled once on this machine and kept in the cache folder. If you empty it, they "
    "are compiled again, and the level Performance measures again."
)
CLEAR, AGAIN = "Clear the cache", "Compile again"


def register() -> None:
    """Callback on_ui_settings: add our options, and make them hold."""
    opts: Any = host.attribute("modules.shared", "opts")
    info: Any = host.attribute("modules.shared", "OptionInfo")
    if not callable(info) or not callable(getattr(opts, "add_option", None)):
        host.say_once("this WebUI has no place for our settings")
        return
    for key, default, label, more, component, args in _options():
        option = info(default, label, component, args, onchange=apply, section=SECTION)
        opts.add_option(key, option.info(more) if hasattr(option, "info") else option)
    panel = info(ABOUT, "", cache_panel, section=SECTION)
    panel.do_not_save = True
    opts.add_option(CACHE_KEY, panel)
    apply()


def _options() -> list[tuple[str, Any, str, str, Any, dict[str, Any]]]:
    """Key, default, label, explanation and component of each setting, and the component's words."""
    import gradio as gr

    now = settings.DEFAULTS
    return [
        (
            *(settings.OPERATIONS_KEY, list(now.operations), "Operations that may be replaced"),
            "The WebUI's own code computes everything that you do not select.",
            *(gr.CheckboxGroup, {"choices": list(settings.OPERATIONS)}),
        ),
        (
            *(settings.HEADROOM_KEY, now.headroom_mib, "Video memory to leave free, in MiB"),
            "For other programs and extensions. Treats the card as having that much less memory.",
            *(gr.Slider, {"minimum": 0, "maximum": settings.MOST_HEADROOM_MIB, "step": 64}),
        ),
        (
            *(settings.PREVIEWS_KEY, now.previews, "Decode live previews of the method 'Full'"),
            "Off: the WebUI's own decoder makes them.",
            *(gr.Checkbox, {}),
        ),
        (
            *(settings.GRAPHS_KEY, now.graphs, "Use GPU graphs for UNet blocks"),
            "Replays each block with a single call, which fast cards need. Auto leaves this off on "
            "AMD cards because of open driver bugs that return wrong values.",
            *(gr.Radio, {"choices": list(settings.GRAPHS)}),
        ),
        (
            *(settings.SPOT_CHECK_KEY, now.spot_check, "Compare results with the WebUI's own"),
            "In each picture, one call to one UNet block of each kind is computed both ways. In "
            "every 16th, so is a corner of the VAE's image. If the results differ, the WebUI's own "
            "code takes over.",
            *(gr.Checkbox, {}),
        ),
        (
            *(settings.COMPARE_SPEED_KEY, now.compare_speed, "Use the faster UNet"),
            "Times the UNet with our blocks in the first picture of each kind, and the WebUI's own "
            "in the second, once for a card. The faster one makes all later pictures. Off: ours "
            "makes all of them.",
            *(gr.Checkbox, {}),
        ),
        (
            *(settings.LOG_LEVEL_KEY, now.log_level, "What is written to the console"),
            "Everything adds what was chosen for each problem, and why.",
            *(gr.Radio, {"choices": list(settings.LOG_LEVELS)}),
        ),
    ]


def apply() -> None:
    """Callback: a setting was changed. A generation that runs is told by its next hook."""
    now = settings.current()
    session.establish(headroom_bytes=now.headroom_mib << 20)
    _log_at(settings.LOG_LEVELS[now.log_level])
    seam = optimizer()
    with host.unless_busy() as idle:
        if idle and seam is not None:
            seam.step_aside(not now.attention)


def clear() -> str:
    """Empty the cache folder; what was done, in a sentence."""
    if _at_work():
        return _at_work()
    freed = cache.clear()
    return f"Removed {size(freed)}. What is loaded stays in use until the next start."


def compile_again() -> str:
    """Forget what was compiled and what failed, and begin anew; what was done, in a sentence."""
    info = identify(host.device())
    seam = optimizer()
    if info.reasons or seam is None:
        why = info.reasons[0] if info.reasons else host.shortcomings()[0]
        return f"There is nothing to compile: {why}."
    if _at_work():
        return _at_work()
    session.end_measuring()
    with host.unless_busy() as idle:
        if not idle:
            return BUSY
        cache.clear(COMPILED)
        background.forget()
        trials.forget()
        launcher.reset()
        engine.reset()
        seam.compile_again()
    return "Compiling. The accordion in txt2img shows the progress."


def _at_work() -> str:
    """Why the cache has to stay as it is; empty where it need not."""
    if background.state().running:
        return COMPILING
    return TRYING if trials.state().running else ""


def _log_at(level: str) -> None:
    """The console gets our messages from this level on, also where nobody else listens."""
    log = logging.getLogger("rocm_sd")
    log.setLevel(level)
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"{host.NAME}: %(message)s"))
        log.addHandler(handler)


# --- the cache folder: where it is, its size, and buttons to empty and refill it


def cache_panel(**setting: Any) -> Any:
    """The component that stands for the setting; `setting` as the WebUI's constructors get."""
    import gradio as gr

    about = gr.HTML(setting.get("value", ABOUT), elem_id=setting.get("elem_id"))
    where = gr.HTML(value=contents, elem_id="rocm_sd_cache_contents")
    with gr.Row():
        empty = gr.Button(CLEAR, elem_id="rocm_sd_cache_clear")
        again = gr.Button(AGAIN, elem_id="rocm_sd_cache_again")
    empty.click(fn=lambda: contents(clear()), outputs=[where], queue=False)
    again.click(fn=lambda: contents(compile_again()), outputs=[where], queue=False)
    return about


def contents(said: str = "") -> str:
    """Folder and size as HTML, and what a button's action said."""
    folder = cache.directory()
    why = "; ".join(cache.reasons())
    lines = [
        f"Folder: <code>{escape(str(folder))}</code>" if folder else "There is no cache folder.",
        f"Size: {size(cache.size_bytes())}",
        escape(why),
        f'<span role="status">{escape(said)}</span>' if said else "",
    ]
    return f'<div class="rocm-sd-cache">{"<br>".join(line for line in lines if line)}</div>'


def size(number: int) -> str:
    """'0 bytes', '12 KiB', '3.4 MiB'."""
    if number < 1024:
        return counted(number, "byte")
    if number < 1 << 20:
        return f"{number / 1024:.0f} KiB"
    return f"{number / (1 << 20):.1f} MiB"
