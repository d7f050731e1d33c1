"""Double of webui.py, modules/initialize.py and initialize_util.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
The order of starting and of "Reload UI".
"""

from modules import (
    extensions,
    script_callbacks,
    scripts,
    sd_hijack,
    sd_hijack_optimizations,
    sd_models,
    shared,
    ui,
)
from modules.call_queue import wrap_queued_call


def initialize():
    shared.opts.onchange(
        "cross_attention_optimization",
        wrap_queued_call(lambda: sd_hijack.model_hijack.redo_hijack(shared.sd_model)),
        call=False,
    )
    initialize_rest()


def initialize_rest(*, reload_script_modules=False):
    extensions.list_extensions()
    scripts.load_scripts()
    # Forge and reForge have all this commented out.
    has_optimizers = hasattr(sd_hijack, "list_optimizers")
    if has_optimizers:
        script_callbacks.on_list_optimizers(sd_hijack_optimizations.list_optimizers)
        sd_hijack.list_optimizers()
    if shared.cmd_opts.skip_load_model_at_start:
        return
    # The real one does the rest in a thread.
    if shared.sd_model is None:
        sd_models.load_model()
    if has_optimizers and sd_hijack.current_optimizer is None:
        sd_hijack.apply_optimizations()


def start_ui():
    script_callbacks.before_ui_callback()
    shared.demo = ui.create_ui()
    script_callbacks.app_started_callback(shared.demo, None)


def reload_ui():
    shared.demo.close()
    script_callbacks.app_reload_callback()
    script_callbacks.script_unloaded_callback()
    initialize_rest(reload_script_modules=True)
    start_ui()
