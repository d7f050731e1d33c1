"""Double of comfy_api/latest (Comfy-Org/ComfyUI a125cd84)."""

from comfy_api.latest import _io as io

__all__ = ["io"]
