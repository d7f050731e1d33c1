"""Double of backend/patcher/base.py.

The surface was read in lllyasviel/stable-diffusion-webui-forge dfdcbab6.
"""


class ModelPatcher:
    def __init__(self, model, load_device, offload_device, size=0, current_device=None, **kwargs):
        self.model, self.load_device, self.offload_device = model, load_device, offload_device
        self.model_options = {"transformer_options": {}}
