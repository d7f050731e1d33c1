"""This checkout as a ComfyUI custom node: what ComfyUI executes. Elsewhere it does nothing."""

import sys
from pathlib import Path

NODE_CLASS_MAPPINGS: "dict[str, type]" = {}
NODE_DISPLAY_NAME_MAPPINGS: "dict[str, str]" = {}
WEB_DIRECTORY = "./lib_rocm_sd/hosts/comfyui/web"


def _register() -> None:
    """Our folder is on sys.path only meanwhile."""
    folder = str(Path(__file__).resolve().parent)
    sys.path.insert(0, folder)
    try:
        from lib_rocm_sd.hosts import oldest
        from lib_rocm_sd.hosts.comfyui import nodes
    finally:
        sys.path.remove(folder)
    if not oldest.torch_serves():
        return
    NODE_CLASS_MAPPINGS.update(nodes.CLASSES)
    NODE_DISPLAY_NAME_MAPPINGS.update(nodes.NAMES)
    nodes.begin()


if "comfy.model_management" in sys.modules:
    _register()
