"""Double of modules/script_callbacks.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
The callbacks that an extension like ours could use.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

from modules import errors, extensions

_CATEGORIES = (
    "app_started",
    "model_loaded",
    "ui_tabs",
    "ui_settings",
    "script_unloaded",
    "before_ui",
    "on_reload",
    "list_optimizers",
    "infotext_pasted",
    "cfg_denoiser",
)


@dataclasses.dataclass
class ScriptCallback:
    script: str
    callback: Any
    name: str = "unnamed"


class CFGDenoiserParams:
    def __init__(
        self,
        x,
        image_cond,
        sigma,
        sampling_step,
        total_sampling_steps,
        text_cond,
        text_uncond,
        denoiser=None,
    ):
        self.x, self.sigma = x, sigma
        self.sampling_step, self.total_sampling_steps = sampling_step, total_sampling_steps
        self.text_cond, self.text_uncond = text_cond, text_uncond
        self.denoiser = denoiser


callback_map: dict[str, list] = {f"callbacks_{category}": [] for category in _CATEGORIES}


def add_callback(callbacks, fun, *, name=None, category="unknown", filename=None):
    if filename is None:
        frame = sys._getframe()  # inspect.stack reads files: a fifth of the time of a start
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        filename = "unknown file" if frame is None else frame.f_code.co_filename
    extension = extensions.find_extension(filename)
    owner = extension.canonical_name if extension else "base"
    full_name = f"{owner}/{Path(filename).name}/{category}" + (f"/{name}" if name else "")
    callbacks.append(ScriptCallback(filename, fun, full_name))


def clear_callbacks():
    for callback_list in callback_map.values():
        callback_list.clear()


def _run(category, *args, backwards=False):
    entries = list(callback_map[f"callbacks_{category}"])
    for entry in reversed(entries) if backwards else entries:
        try:
            yield entry.callback(*args)
        except Exception:
            errors.report(f"Error executing callback {category} for {entry.script}", exc_info=True)


def app_started_callback(demo, app):
    list(_run("app_started", demo, app))


def app_reload_callback():
    list(_run("on_reload"))


def model_loaded_callback(sd_model):
    list(_run("model_loaded", sd_model))


def ui_tabs_callback():
    return [tab for tabs in _run("ui_tabs") for tab in tabs or []]


def ui_settings_callback():
    list(_run("ui_settings"))


def infotext_pasted_callback(infotext, params):
    list(_run("infotext_pasted", infotext, params))


def cfg_denoiser_callback(params: CFGDenoiserParams):
    list(_run("cfg_denoiser", params))


def script_unloaded_callback():
    list(_run("script_unloaded", backwards=True))


def before_ui_callback():
    list(_run("before_ui", backwards=True))


def list_optimizers_callback():
    res: list[Any] = []
    list(_run("list_optimizers", res))
    return res


def on_app_started(callback, *, name=None):
    add_callback(callback_map["callbacks_app_started"], callback, name=name, category="app_started")


def on_before_reload(callback, *, name=None):
    add_callback(callback_map["callbacks_on_reload"], callback, name=name, category="on_reload")


def on_model_loaded(callback, *, name=None):
    add_callback(
        callback_map["callbacks_model_loaded"], callback, name=name, category="model_loaded"
    )


def on_ui_tabs(callback, *, name=None):
    add_callback(callback_map["callbacks_ui_tabs"], callback, name=name, category="ui_tabs")


def on_ui_settings(callback, *, name=None):
    add_callback(callback_map["callbacks_ui_settings"], callback, name=name, category="ui_settings")


def on_infotext_pasted(callback, *, name=None):
    add_callback(
        callback_map["callbacks_infotext_pasted"], callback, name=name, category="infotext_pasted"
    )


def on_cfg_denoiser(callback, *, name=None):
    add_callback(
        callback_map["callbacks_cfg_denoiser"], callback, name=name, category="cfg_denoiser"
    )


def on_script_unloaded(callback, *, name=None):
    add_callback(
        callback_map["callbacks_script_unloaded"], callback, name=name, category="script_unloaded"
    )


def on_before_ui(callback, *, name=None):
    add_callback(callback_map["callbacks_before_ui"], callback, name=name, category="before_ui")


def on_list_optimizers(callback, *, name=None):
    add_callback(
        callback_map["callbacks_list_optimizers"], callback, name=name, category="list_optimizers"
    )
