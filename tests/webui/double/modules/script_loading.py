"""Double of modules/script_loading.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
"""

import importlib.util
from pathlib import Path

from modules import errors


def load_module(path):
    spec = importlib.util.spec_from_file_location(Path(path).name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def preload_extensions(extensions_dir, parser, extension_list=None):
    folder = Path(extensions_dir)
    if not folder.is_dir():
        return
    for dirname in sorted(extension_list or [path.name for path in folder.iterdir()]):
        preload_script = folder / dirname / "preload.py"
        if not preload_script.is_file():
            continue
        try:
            module = load_module(str(preload_script))
            if hasattr(module, "preload"):
                module.preload(parser)
        except Exception:
            errors.report(f"Error running preload() for {preload_script}", exc_info=True)
