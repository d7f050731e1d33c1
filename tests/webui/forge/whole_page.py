"""A whole real Forge or reForge whose page is served, until its standard input ends.

python whole_page.py CHECKOUT DATA [card], as whole.py; the page's address is in DATA/address.txt.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from typing import Any

import torch
import whole


def serve(modules: Any) -> str:
    """As its webui.py does; the address."""
    util: Any = importlib.import_module("modules.initialize_util")
    demo = modules.shared.demo.queue(64)
    ours = (whole.DATA / "extensions" / "rocm-sd").resolve()  # a link here
    paths = [str(whole.ROOT), str(whole.DATA), str(ours)]
    options: dict[str, Any] = {"server_name": "127.0.0.1", "prevent_thread_lock": True}
    if not whole.IS_REFORGE:
        canvas: Any = importlib.import_module("modules_forge.forge_canvas.canvas")
        paths.append(canvas.canvas_js_root_path)
    app, address, _ = demo.launch(allowed_paths=paths, **options)
    util.setup_middleware(app)
    # fonts, which a checkout that was never launched does not have
    importlib.import_module("modules.launch_utils").repo_dir = lambda name: str(whole.DATA)
    importlib.import_module("modules.progress").setup_progress_api(app)
    modules.ui.setup_ui_api(app)
    importlib.import_module("modules.ui_extra_networks").add_pages_to_demo(app)
    modules.script_callbacks.app_started_callback(demo, app)
    return str(address)


def keep_model(modules: Any) -> None:
    """The page chooses a checkpoint, whose file has no model in it."""
    models = modules.sd_models
    if whole.IS_REFORGE:
        models.reload_model_weights = lambda *given, **more: models.model_data.sd_model
    else:
        models.forge_model_reload = lambda: (models.model_data.sd_model, False)


def main() -> None:
    torch.set_num_threads(1)
    modules = whole.start()
    whole.load(modules)
    keep_model(modules)
    (whole.DATA / "address.txt").write_text(serve(modules), encoding="utf-8")
    threading.Thread(target=lambda: os._exit(len(sys.stdin.read()))).start()
    importlib.import_module("modules_forge.main_thread").loop()


if __name__ == "__main__":
    main()
