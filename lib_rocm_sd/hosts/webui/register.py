"""AUTOMATIC1111's WebUI, its forks and the Forges: registers, and leaves no trace when unloaded.

The WebUI has our folder on sys.path only while it executes scripts/rocm_sd.py, so all is imported
from here. It executes that file again at each "Reload UI" but never imports this library again:
what must survive lives here, and registering is idempotent. The order of calls was read in
lshqqytiger/stable-diffusion-webui-amdgpu e61adddd (A1111 1.10).
"""

from __future__ import annotations

from typing import Any

from lib_rocm_sd import cache
from lib_rocm_sd.hosts.webui import (
    host,
    script,
    settings,
    settings_page,
    several,
    speedtest,
    unet,
    upscaler,
    vae,
)
from lib_rocm_sd.hosts.webui.seams import optimizer
from lib_rocm_sd.hosts.webui.trials import trials


def register() -> tuple[type, type | None]:
    """Register with the WebUI; returns the classes that it looks for in scripts/rocm_sd.py: of the
    always-on script, and of Extras, None where that would be of no use.
    """
    folder = host.cache_directory()
    if folder is not None:
        cache.set_directory(folder)
    lacking = host.shortcomings()
    if lacking:
        host.say_once(f"not active in this WebUI: {'; '.join(lacking)}")
    else:
        settings.renew()
        trials.begin()
        if host.forge() is None:
            host.add_callback("list_optimizers", list_optimizer)
        host.add_callback("before_ui", begin)
        host.add_callback("script_unloaded", unload)
        host.add_callback("model_loaded", model_loaded)
        host.add_callback("model_loaded", vae.session.model_loaded)
        host.add_callback("model_loaded", unet.session.model_loaded)
        host.add_callback("model_loaded", several.session.model_loaded)
        vae.session.lend = several.session.lend
        host.add_callback("cfg_denoiser", unet.session.before_step)
        host.add_callback("cfg_denoiser", several.session.before_step)
        host.add_callback("ui_settings", settings_page.register)
        host.add_callback("before_ui", script.add_axes)
        host.add_callback("before_ui", upscaler.session.take_over)
    host.add_callback("ui_tabs", speedtest.tab)
    host.add_callback("app_started", app_started)
    base: Any = host.attribute("modules.scripts", "Script")
    extras = host.attribute("modules.scripts_postprocessing", "ScriptPostprocessing")
    return script.make(base), script.make_extras(None if lacking else extras)


def list_optimizer(listed: list[Any]) -> None:
    """Callback: add ours to the WebUI's list. It keeps those whose is_available() is true."""
    ours = optimizer()
    if ours is not None and ours not in listed:
        listed.append(ours)


def begin() -> None:
    """Callback, before the UI is created, also after "Reload UI"."""
    ours = optimizer()
    if ours is not None:
        ours.begin()


def model_loaded(model: Any) -> None:
    """Callback: the WebUI has another model. It does not say so of one that it has kept, so each
    generation looks, too.
    """
    ours = optimizer()
    if ours is not None:
        ours.order()


def app_started(demo: Any, app: Any) -> None:
    """Callback, when the server runs: after "Reload UI" that is another one."""
    if app is None:
        return
    from lib_rocm_sd.hosts.webui import api  # needs the server's library, which tests do without

    api.add_routes(app)


def unload() -> None:
    """Callback, before scripts are loaded anew: leave what would be there without us."""
    vae.session.end()
    several.session.end()
    unet.session.end()
    upscaler.session.unload()
    ours = optimizer()
    if ours is not None:
        ours.leave()
