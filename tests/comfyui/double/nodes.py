"""Double of nodes.py (Comfy-Org/ComfyUI a125cd84): the classes of all nodes by their names."""

from comfy_extras.nodes_upscale_model import ImageUpscaleWithModel

NODE_CLASS_MAPPINGS = {"ImageUpscaleWithModel": ImageUpscaleWithModel}
